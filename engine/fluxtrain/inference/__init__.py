"""Trained models in use: their loss on data, and the text that they write."""
