"""Steps on the device that were skipped because the norm or a loss is not finite.

The device's kernels skip such a step themselves; the host has counted it by then and takes it back.
"""

from __future__ import annotations

from collections.abc import Sequence

from fluxtrain.memory.segment import Member
from fluxtrain.updates.norm import GradNorm


class RefusedSteps:
    """Counted steps that the device may have skipped."""

    def __init__(self) -> None:
        self._counted: list[tuple[GradNorm, Sequence[Member]]] = []

    def note(self, norm: GradNorm | None, stepped: Sequence[Member]) -> None:
        """Note a step by `norm` that was queued on the device and counted up `stepped`."""
        if norm is not None and norm.guards:
            self._counted.append((norm, stepped))

    def take_back(self, *, wait: bool = False) -> None:
        """Take back the counts of skipped steps whose norms are known; wait: of all steps.
        `LossScale.take_back_skipped` does it for steps that overflowed."""
        unknown: list[tuple[GradNorm, Sequence[Member]]] = []
        for norm, stepped in self._counted:
            if not (wait or norm.is_known()):
                unknown.append((norm, stepped))
            elif norm.refuses():
                for member in stepped:
                    member.step -= 1
        self._counted = unknown
