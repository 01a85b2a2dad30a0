"""Optimizer updates: queued in forward order, clipped by the norm, run during the training."""
