"""Plots of characters: from numbers and a size to lines. No Textual, no state."""
