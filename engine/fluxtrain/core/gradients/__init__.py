"""Gradients: summed on the device by group, downloaded, and accumulated on the host.

A gradient passes through `gradients.py` (one kind of sum: flat here, others in `vocab_chunk_sum.py`
and `embedding_sum.py`) and `host_gradients.py` (the group's gradients on the host).
"""
