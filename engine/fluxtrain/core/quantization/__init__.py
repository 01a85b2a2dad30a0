"""Frozen weights in 4 and 8 bits: their layout in memory, how they are packed and unpacked."""
