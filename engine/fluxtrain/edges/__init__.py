"""The model's edges: an embedding looked up by rows, and the head with its loss."""
