"""Optimizer updates: queued in forward order, clipped by the norm, run beside the training."""
