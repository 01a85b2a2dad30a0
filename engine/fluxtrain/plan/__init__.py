"""Decisions: facts in, choices with their reasons out. Pure Python, no torch, no device."""
