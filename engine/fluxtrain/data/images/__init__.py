"""Pairs of images: files to pairs, checked and sorted into sizes. No torch here."""
