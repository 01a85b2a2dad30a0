"""Steps on the device that were left out because norm or losses are not finite.

The kernels there see it themselves; the host has counted the step by then, and takes it back.
"""

from __future__ import annotations

from collections.abc import Sequence

from fluxtrain.memory.segment import Member
from fluxtrain.updates.norm import GradNorm


class RefusedSteps:
    """Counted steps of which it is not known yet whether they were made."""

    def __init__(self) -> None:
        self._counted: list[tuple[GradNorm, Sequence[Member]]] = []

    def note(self, norm: GradNorm | None, stepped: Sequence[Member]) -> None:
        """A step by `norm` was queued on the device, which counted one up for `stepped`."""
        if norm is not None and norm.guards:
            self._counted.append((norm, stepped))

    def settle(self, *, wait: bool = False) -> None:
        """Take back the counts of those that were left out, as far as their norms are known; wait:
        for all of them. Left out for an overflow: `LossScale.settle` does it."""
        unknown: list[tuple[GradNorm, Sequence[Member]]] = []
        for norm, stepped in self._counted:
            if not (wait or norm.is_known()):
                unknown.append((norm, stepped))
            elif norm.refuses():
                for member in stepped:
                    member.step -= 1
        self._counted = unknown
