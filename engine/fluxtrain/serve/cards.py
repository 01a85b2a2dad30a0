"""The cards of this machine: which of them a job may have, and which failed."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Collection

from fluxtrain.errors import EXIT_FINISHED
from fluxtrain.events.answers.asking import FLUXTRAIN
from fluxtrain.files.parent import environment_of_child

EXAMINE_PERIOD_S = 600.0


class Cards:
    """Gives cards out, one a job; without a list there is one place, -1, for all cards."""

    def __init__(self, listed: tuple[int, ...]) -> None:
        self._listed = listed or (-1,)
        self._failed: dict[int, _Examined] = {}

    @property
    def aside(self) -> frozenset[int]:
        """Return the cards that failed and get no jobs."""
        return frozenset(self._failed)

    def free(self, taken: Collection[int | None]) -> int | None:
        """Return a card that is well and not taken; None where there is none."""
        self._failed = {card: one for card, one in self._failed.items() if not one.is_well()}
        return next((one for one in self._listed if one not in {*taken, *self._failed}), None)

    def put_aside(self, card: int | None) -> None:
        """Give a card to no job until `fluxtrain doctor` finds nothing wrong with it."""
        if card is not None and card >= 0:
            self._failed[card] = _Examined(card)


class _Examined:
    """A card that failed, put aside until `fluxtrain doctor` finds nothing wrong with it."""

    def __init__(self, card: int) -> None:
        self._card, self._process = card, self._begin(card)
        self._begun_s = time.monotonic()

    def is_well(self) -> bool:
        """Return whether the examination has passed; begin one again from time to time."""
        if self._process.poll() == EXIT_FINISHED:
            return True
        if self._process.poll() is not None and self._is_due():
            self._process, self._begun_s = self._begin(self._card), time.monotonic()
        return False

    def _is_due(self) -> bool:
        return time.monotonic() - self._begun_s > EXAMINE_PERIOD_S

    @staticmethod
    def _begin(card: int) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [*FLUXTRAIN, "doctor", "--json"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env={**environment_of_child(), "CUDA_VISIBLE_DEVICES": str(card)},
        )
