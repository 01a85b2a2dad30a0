"""Measured rates of this machine: memory, bus, disk, AdamW."""
