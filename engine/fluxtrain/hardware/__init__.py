"""Describes the machine and measures its rates. `bandwidth` and `probe` import torch when used."""
