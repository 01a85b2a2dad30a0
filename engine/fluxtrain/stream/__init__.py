"""Blocks that stream through the device: discovery, the autograd function, and `wrap`."""
