"""Trained models in use: exported and merged, evaluated, asked for text."""
