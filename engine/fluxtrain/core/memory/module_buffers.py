"""Buffers that a block writes to in its forward pass: BatchNorm's statistics, counters.

The recompute must see them as the forward pass did, and must not write to them a second time.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

Copies = dict[int, Tensor]  # by position in module.buffers()


# a module's own buffers and submodules, and which submodules there were; a reference to the module
# itself would be a cycle, since it owns its unit
_Inside = tuple[dict[str, Any], dict[str, Any], tuple[Any, ...]]


class WrittenBuffers:
    """Finds the buffers that a module's forward changes: on first use, in train and in eval."""

    def __init__(self) -> None:
        self._written: dict[bool, frozenset[int]] = {}
        self._bare: list[_Inside] = []  # of the module and its submodules, where none has a buffer

    def before(self, module: nn.Module) -> Copies:
        """Copy the buffers that the coming forward will change; on first use, all of them."""
        known = self._written.get(module.training)
        if known is not None and not known:
            return {}
        if self._bare and self._is_still_bare():
            return {}
        buffers = list(module.buffers())
        self._bare = [] if buffers else [_inside(each) for each in module.modules()]
        return {i: b.clone() for i, b in enumerate(buffers) if known is None or i in known}

    def _is_still_bare(self) -> bool:
        """Return whether no buffer was added. A walk through all modules would take as long as
        some kernels."""
        return all(
            not buffers and tuple(modules.values()) == known
            for buffers, modules, known in self._bare
        )

    def after(self, module: nn.Module, before: Copies) -> Copies:
        """Return the copies of the buffers that the forward has changed."""
        if not before:
            return before
        now = list(module.buffers())
        changed = {i: copy for i, copy in before.items() if not torch.equal(now[i], copy)}
        self._written.setdefault(module.training, frozenset(changed))
        return changed


def _inside(module: nn.Module) -> _Inside:
    return module._buffers, module._modules, tuple(module._modules.values())


@contextmanager
def as_before(module: nn.Module, copies: Copies) -> Iterator[None]:
    """Give the buffers their values from before the forward inside the context, and undo that
    afterwards."""
    if not copies:
        yield
        return
    buffers = list(module.buffers())
    found = {i: buffers[i].clone() for i in copies}
    put_back(module, copies)
    try:
        yield
    finally:
        put_back(module, found)


def put_back(module: nn.Module, copies: Copies) -> None:
    """Give the buffers the values that were copied. Autograd does not count this as a write, after
    which it would refuse a saved buffer: a recomputation finds the same values as the forward."""
    if not copies:
        return
    buffers = list(module.buffers())
    with torch.no_grad():
        for i, copy in copies.items():
            buffers[i].data.copy_(copy)
