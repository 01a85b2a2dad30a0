"""Tensors that Hugging Face collects from inside a block (router logits, attentions).

Hooks on inner modules append to a collector while the block runs inside of its autograd function:
such tensors would silently lose their gradients (up to 19 % of Mixtral's, through its auxiliary
loss). They are taken out of the collector, made outputs of the autograd function, and put back.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor

Collected = dict[str, Any]  # a list for each name that collects


def active_collector() -> Collected | None:
    """Return Transformers' collector of the forward under way; None if there is none."""
    module = sys.modules.get("transformers.utils.output_capturing")
    if module is None:
        return None
    found: Collected | None = module._active_collector.get()
    return found or None


class Capture:
    """Tensors that one run of a block adds to the collector, as extra outputs keyed by name."""

    def __init__(self, keys: tuple[str, ...]) -> None:
        self.keys = keys

    @staticmethod
    def of(collector: Collected | None) -> Capture:
        keys = tuple(k for k, v in (collector or {}).items() if isinstance(v, list))
        return Capture(keys)

    @contextmanager
    def collecting(self) -> Iterator[Collected]:
        """Collect into this run's own lists; the outer collector stays unchanged."""
        mine: Collected = {key: [] for key in self.keys}
        module = sys.modules.get("transformers.utils.output_capturing")
        if not self.keys or module is None:
            yield mine
            return
        token = module._active_collector.set(mine)
        try:
            yield mine
        finally:
            module._active_collector.reset(token)

    def put_back(self, collector: Collected | None, extra: Collected) -> None:
        """Append the collected tensors, now outputs of the block, to the outer collector."""
        if collector is None:
            return
        for key in self.keys:
            collector[key].extend(v for v in extra[key] if isinstance(v, Tensor))
