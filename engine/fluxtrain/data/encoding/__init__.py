"""Rows as tokens: which ids they become, and which of these are trained on."""
