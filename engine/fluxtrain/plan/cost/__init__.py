"""Seconds of a step, computed from a layout and measured rates."""
