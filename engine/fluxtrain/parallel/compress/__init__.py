"""Compressed gradients: methods by name, error feedback, and their place in torch's hooks."""
