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
        self._failed: dict[int, tuple[subprocess.Popen[bytes], float]] = {}  # examined since when

    @property
    def aside(self) -> frozenset[int]:
        """Return the cards that failed and get no jobs."""
        return frozenset(self._failed)

    def free(self, taken: Collection[int | None]) -> int | None:
        """Return a card that is well and not taken; None where there is none."""
        for card, (doctor, begun_s) in list(self._failed.items()):
            if doctor.poll() == EXIT_FINISHED:
                del self._failed[card]
            elif doctor.poll() is not None and time.monotonic() - begun_s > EXAMINE_PERIOD_S:
                self.put_aside(card)
        return next((one for one in self._listed if one not in {*taken, *self._failed}), None)

    def put_aside(self, card: int | None) -> None:
        """Give a card to no job until `fluxtrain doctor` finds nothing wrong with it."""
        if card is None or card < 0:
            return
        doctor = subprocess.Popen(
            [*FLUXTRAIN, "doctor", "--json"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env={**environment_of_child(), "CUDA_VISIBLE_DEVICES": str(card)},
        )
        self._failed[card] = (doctor, time.monotonic())
