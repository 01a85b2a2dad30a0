"""`Chunk`: some rows of a batch in one call of a block."""

from __future__ import annotations

from dataclasses import dataclass, field

from fluxtrain.block.recompute import Saved, Tape
from fluxtrain.block.rng import RandomState
from fluxtrain.guards.checks import Sums


@dataclass(eq=False)
class Chunk:
    """Some rows of a batch, and their graph."""

    span: tuple[int, int]
    random: RandomState | None = None  # before the forward
    tape: Tape | None = None
    saved: Saved | None = None  # what the graph saves; None: the graph is recorded again
    sums: Sums | None = None  # checksums that the recomputation is compared with
    result_starts: list[int] = field(default_factory=list)  # of its rows in each result
    result_rows: list[int] = field(default_factory=list)

    def halves(self) -> list[Chunk]:
        """Return two chunks, to be recorded again, with half of the rows each; none where a result
        has other rows than the batch."""
        first, stop = self.span
        if any(rows != stop - first for rows in self.result_rows):
            return []
        middle = (first + stop) // 2
        return [
            Chunk(
                (a, b),
                random=self.random,
                result_starts=[start + a - first for start in self.result_starts],
                result_rows=[b - a] * len(self.result_rows),
            )
            for a, b in ((first, middle), (middle, stop))
        ]
