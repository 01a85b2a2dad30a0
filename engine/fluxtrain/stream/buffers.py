"""Buffers that a block writes to in its forward pass: BatchNorm's statistics, counters.

The recompute must see them as the forward pass did, and must not write to them a second time.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

Copies = dict[int, Tensor]  # by position in module.buffers()


class WrittenBuffers:
    """Which buffers of a module its forward changes; found on first use, in train and in eval."""

    def __init__(self) -> None:
        self._written: dict[bool, frozenset[int]] = {}

    def before(self, module: nn.Module) -> Copies:
        """Copies of what the coming forward is going to change: of everything, on first use."""
        known = self._written.get(module.training)
        return {
            i: buffer.clone()
            for i, buffer in enumerate(module.buffers())
            if known is None or i in known
        }

    def after(self, module: nn.Module, before: Copies) -> Copies:
        """The copies of those that the forward did change."""
        if not before:
            return before
        now = list(module.buffers())
        changed = {i: copy for i, copy in before.items() if not torch.equal(now[i], copy)}
        self._written.setdefault(module.training, frozenset(changed))
        return changed


@contextmanager
def as_before(module: nn.Module, copies: Copies) -> Iterator[None]:
    """Inside, the buffers are as they were before the forward; afterwards as they were found."""
    buffers = list(module.buffers()) if copies else []
    found = {i: buffers[i].clone() for i in copies}
    put_back(module, copies)
    try:
        yield
    finally:
        put_back(module, found)


def put_back(module: nn.Module, copies: Copies) -> None:
    """Give the buffers the values that were copied. That is no write for autograd, which refuses
    what was changed after it was saved: whatever runs again finds what it found before."""
    buffers = list(module.buffers()) if copies else []
    with torch.no_grad():
        for i, copy in copies.items():
            buffers[i].data.copy_(copy)
