"""Advice that follows from something measured in this run, said once."""

from __future__ import annotations

from collections import deque

from fluxtrain.train.announce import Announcer

_STEPS = 20
_STALLED_SHARE = 0.25
_CURES = {
    "weights": (
        "waiting for weights to arrive",
        "a larger train.batch_rows spreads each copy over more tokens",
    ),
    "update": (
        "waiting for the optimizer in host memory",
        "a larger train.batch_rows, or placement.offload=none where it fits",
    ),
    "gradients": (
        "waiting for gradients to leave the device",
        "a larger train.batch_rows spreads each copy over more tokens",
    ),
}


class StallWatch:
    """Looks at the stalls of the last steps and names the largest cause, once for each."""

    def __init__(self, announcer: Announcer) -> None:
        self._announcer = announcer
        self._steps_s: deque[float] = deque(maxlen=_STEPS)
        self._stalls_s: deque[dict[str, float]] = deque(maxlen=_STEPS)
        self._told: set[str] = set()

    def step_took(self, step_s: float, stalls_s: dict[str, float]) -> None:
        """Note one step; speaks when one cause took a quarter of the last 20 steps."""
        self._steps_s.append(step_s)
        self._stalls_s.append(stalls_s)
        if len(self._steps_s) < _STEPS:
            return
        total_s = sum(self._steps_s)
        for cause, (words, cure) in _CURES.items():
            waited_s = sum(stalls.get(cause, 0.0) for stalls in self._stalls_s)
            share = waited_s / total_s
            if share >= _STALLED_SHARE and cause not in self._told:
                self._told.add(cause)
                self._announcer.advise(
                    f"{share:.0%} of the last {_STEPS} steps went into {words}",
                    gain=f"up to {share:.0%} of the step time",
                    how=cure,
                )
