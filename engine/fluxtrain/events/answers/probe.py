"""The answer of `fluxtrain probe --json`: this machine, the disk of the runs, rates."""

from __future__ import annotations

import time
from typing import ClassVar

from fluxtrain.events.answers.answer import Answer
from fluxtrain.events.answers.machine import Card, Disk, Machine, Rate


class ProbeAnswer(Answer, frozen=True, kw_only=True):
    """The machine, the disk of the runs, and measured rates by name."""

    COMMAND: ClassVar[str] = "probe"

    machine: Machine
    disk: Disk
    rates: dict[str, Rate]
    cards: tuple[Card, ...] = ()  # as torch sees them, where there are several
    measured_at_s: float  # Unix time of the rates
    measuring_s: float  # what that took
    others_share: float | None = None  # of all processors, used by other programs meanwhile
    tried_again_at_s: float | None = None  # Unix time: rates that had failed, by themselves
    from_cache: bool = False

    def rate(self, name: str) -> float | None:
        """Bytes a second (for a matmul: operations, for AdamW: parameters); None: not measured."""
        found = self.rates.get(name)
        return None if found is None else found.per_s

    @property
    def age_s(self) -> float:
        """How old the rates are."""
        return max(0.0, time.time() - self.measured_at_s)
