"""Run a block: chunks of rows, recomputation, random state."""
