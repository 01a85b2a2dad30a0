"""Prefetch: learn the order in which units run, and upload the next units' weights meanwhile."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from fluxtrain.memory.group import Group
from fluxtrain.memory.unit import Unit
from fluxtrain.memory.window import Window
from fluxtrain.plan.cost.prefetch import LOOKS_AHEAD


class CopiesAhead:
    """Prefetches weights in the order in which units ran last, forward and backward."""

    def __init__(self, window: Window, groups: Sequence[Group], card: int = 0) -> None:
        """`groups` are those of the whole model, of which `card` copies its own."""
        self._window, self._groups, self._card = window, groups, card
        self._following: dict[tuple[str, Unit | None], Unit] = {}
        self._last: dict[str, Unit | None] = {"forward": None, "backward": None}
        self._lock = threading.RLock()

    def reach(self, direction: str, unit: Unit, slots: int) -> None:
        """Note that a unit is about to compute, after the last one, and prefetch the next units."""
        with self._lock:
            self._following[direction, self._last[direction]] = unit
            self._last[direction] = unit
            self._copy(direction, unit, slots)

    def begin_next_step(self, slots: int) -> None:
        """Prefetch the first units of the next forward, each as soon as it is updated."""
        with self._lock:
            self._copy("forward", None, slots)

    def end_pass(self) -> None:
        """Treat the next unit as the first of its pass."""
        self._last = {"forward": None, "backward": None}

    def _copy(self, direction: str, unit: Unit | None, slots: int) -> None:
        mine = (group.placement for group in self._groups if group.placement.card == self._card)
        if all(placement.weights == "device" for placement in mine):
            return
        near = set(unit.groups) if unit is not None else set()
        seen: list[Unit] = [] if unit is None else [unit]
        wanted = max(1, slots - 1)
        while wanted and len(seen) <= LOOKS_AHEAD:
            unit = self._following.get((direction, unit))
            if unit is None or unit in seen:
                break
            seen.append(unit)
            if unit.in_vocab_chunks and unit.vocab_chunks is not None and direction == "forward":
                unit.vocab_chunks.prefetch(0)
                unit.vocab_chunks.prefetch(1)
            copied = [group for group in unit.copied if group.placement.weights != "device"]
            near.update(copied)
            started = [self._window.prefetch(group, near) for group in copied]
            if not all(started):
                break
            wanted -= self._window.is_shared_by(copied)
