"""Gradients: summed on the device by group, downloaded, and accumulated on the host.

A gradient passes through `gradients.py` (which sum it belongs to), one kind of sum (`flat_sum.py`,
`vocab_chunk_sum.py` or `embedding_sum.py`) and `host_gradients.py` (the group's gradients on the
host).
"""
