"""Copies of arguments that many blocks of a card get: rotary tables, masks."""

from __future__ import annotations

import weakref
from collections.abc import Callable

from torch import Tensor

from fluxtrain.guards.shared_memory import version_of

_MOST = 64  # copies kept at a time


class SharedArguments:
    """One copy for each tensor, as long as it lives and is not written to."""

    def __init__(self) -> None:
        self._copies: dict[int, tuple[weakref.ref[Tensor], int, Tensor]] = {}  # by id

    def copy_of(self, tensor: Tensor, make: Callable[[], Tensor]) -> Tensor:
        """Return the card's copy of the tensor, which `make` makes on first use. Writes
        to tensors of inference mode are not counted: those are copied each time."""
        if tensor.is_inference():
            return make()
        known = self._copies.get(id(tensor))
        version = version_of(tensor)
        if known is not None and known[0]() is tensor and known[1] == version:
            return known[2]
        self._forget_dead()
        made = make()
        self._copies[id(tensor)] = weakref.ref(tensor), version, made
        return made

    def _forget_dead(self) -> None:
        alive = {key: kept for key, kept in self._copies.items() if kept[0]() is not None}
        self._copies = dict(list(alive.items())[-_MOST:])
