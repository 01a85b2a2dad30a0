"""The copies of weights ahead of the computation."""
