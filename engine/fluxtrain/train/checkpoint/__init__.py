"""Checkpoints: written, verified, recovered, resumed."""
