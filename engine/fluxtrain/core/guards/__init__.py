"""Detect what would silently give wrong gradients, and refuse it with a cure."""
