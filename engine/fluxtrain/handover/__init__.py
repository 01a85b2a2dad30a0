"""Tensors between blocks on different cards: chunks handed over as they are computed."""
