"""Copies ahead of the computation: who follows whom is learned, and the next units' weights come
in while this one computes."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from fluxtrain.memory.group import Group
from fluxtrain.memory.unit import Unit
from fluxtrain.memory.window import Window
from fluxtrain.plan.cost.prefetch import LOOKS_AHEAD


class CopiesAhead:
    """The order in which units ran last, forward and backward."""

    def __init__(self, window: Window, groups: Sequence[Group]) -> None:
        self._window, self._groups = window, groups
        self._following: dict[tuple[str, Unit | None], Unit] = {}
        self._last: dict[str, Unit | None] = {"forward": None, "backward": None}
        self._lock = threading.RLock()

    def reach(self, direction: str, unit: Unit, slots: int) -> None:
        """A unit is about to compute: note whom it follows, and copy the next ones in."""
        with self._lock:
            self._following[direction, self._last[direction]] = unit
            self._last[direction] = unit
            self._copy(direction, unit, slots)

    def begin_next_step(self, slots: int) -> None:
        """Copy the first units of the next forward in as soon as they are updated."""
        with self._lock:
            self._copy("forward", None, slots)

    def end_pass(self) -> None:
        """Let the next unit be the first of its pass."""
        self._last = {"forward": None, "backward": None}

    def _copy(self, direction: str, unit: Unit | None, slots: int) -> None:
        if all(group.placement.weights == "device" for group in self._groups):
            return
        near = set(unit.groups) if unit is not None else set()
        seen: list[Unit] = [] if unit is None else [unit]
        wanted = max(1, slots - 1)
        while wanted and len(seen) <= LOOKS_AHEAD:
            unit = self._following.get((direction, unit))
            if unit is None or unit in seen:
                break
            seen.append(unit)
            if unit.in_slices and unit.slices is not None and direction == "forward":
                unit.slices.prefetch(0)
                unit.slices.prefetch(1)
            copied = [group for group in unit.copied if group.placement.weights != "device"]
            near.update(copied)
            started = [self._window.prefetch(group, near) for group in copied]
            if not all(started):
                break
            wanted -= self._window.is_shared_by(copied)
