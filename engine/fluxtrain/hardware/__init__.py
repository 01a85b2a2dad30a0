"""Describe the machine; `probe`, which stands above, measures its rates."""
