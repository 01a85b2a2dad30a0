"""Tensors between the cards of a model: blocks on any card, all code around them on the first."""
