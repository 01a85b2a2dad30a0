"""The run directory: its files, its lock, and the control socket of the trainer that uses it."""
