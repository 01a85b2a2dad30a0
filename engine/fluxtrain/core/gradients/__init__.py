"""Gradients: summed on the device by group, downloaded, and accumulated on the host.

A gradient passes through `gradients.py` (its sum: flat, rows of an embedding, or the vocabulary
chunks of `vocab_chunk_sum.py`) and `host_gradients.py` (the group's gradients on the host).
"""
