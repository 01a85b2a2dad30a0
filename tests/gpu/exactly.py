"""Computations on a GPU whose bits do not depend on how busy it is."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel


@contextmanager
def exactly() -> Iterator[None]:
    """Sum in one order inside. The backward passes of torch's fused attentions add up the parts of
    long rows as they come, and only warn of it where other operations are to be let pass."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        with sdpa_kernel(SDPBackend.MATH):
            yield
    finally:
        torch.use_deterministic_algorithms(False)
