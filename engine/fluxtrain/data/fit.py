"""Counts what does not fit into a row, so that the user is told."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from fluxtrain.data.splitting import Spans
from fluxtrain.data.store.tokens import TokenSource, learnt_in

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """How many samples are longer than a row, and what becomes of them."""

    row_tokens: int
    samples: int
    longer: int = 0  # than a row
    cut: int = 0  # conversations of which the beginning is learnt
    divided: int = 0  # texts in several rows
    left_out: int = 0  # samples with nothing to learn in their row
    lost: int = 0  # tokens to learn that are in no row
    first_left_out: str = ""  # place of its row in the data

    @property
    def share(self) -> float:
        """Return the share of the samples that fit into a row."""
        return 1 - self.longer / self.samples if self.samples else 1.0

    def sentences(self) -> list[str]:
        """Return what a person should be told, a sentence each; none where everything fits."""
        told = []
        if self.cut:
            told.append(
                f"{_samples(self.cut)} of {self.samples:,} longer than a row of {self.row_tokens} "
                f"tokens {_are(self.cut)} cut: what is behind is not learnt"
            )
        if self.left_out:
            told.append(
                f"{_samples(self.left_out)} of {self.samples:,} {_are(self.left_out)} left out: "
                f"nothing to learn is within their first {self.row_tokens} tokens (first: "
                f"{self.first_left_out}); raise data.sequence_length to keep them"
            )
        if self.divided:
            told.append(
                f"{self.divided:,} of {self.samples:,} texts are longer than a row of "
                f"{self.row_tokens} tokens and are cut into several"
            )
        return told


def fit_of(
    tokens: TokenSource, spans: Spans, starts: Ints, predicted: Ints, row_tokens: int
) -> Fit:
    """Compare spans with their pieces: where these start, how many tokens of each are learnt."""
    longer = spans.lengths > row_tokens
    pieces = np.searchsorted(starts, spans.starts + spans.lengths) - np.searchsorted(
        starts, spans.starts
    )
    sums = np.concatenate([[0], np.cumsum(predicted)])
    firsts = np.searchsorted(starts, spans.starts)
    learnt = sums[firsts + pieces] - sums[firsts]
    left_out = (learnt == 0) & (spans.lengths > 1)
    cut = longer & (pieces == 1) & ~left_out
    dropped = np.flatnonzero(cut | left_out)
    lost = learnt_in(tokens, spans.starts[dropped], spans.lengths[dropped]) - learnt[dropped]
    first = np.flatnonzero(left_out)[:1]
    return Fit(
        row_tokens=row_tokens,
        samples=len(spans.lengths),
        longer=int(longer.sum()),
        cut=int(cut.sum()),
        divided=int((pieces > 1).sum()),
        left_out=int(left_out.sum()),
        lost=int(lost.sum()),
        first_left_out=_origin(tokens, int(spans.starts[first[0]])) if len(first) else "",
    )


def _origin(tokens: TokenSource, place: int) -> str:
    return tokens.origin(int(np.searchsorted(tokens.starts, place, side="right")) - 1)


def _samples(count: int) -> str:
    return "1 sample" if count == 1 else f"{count:,} samples"


def _are(count: int) -> str:
    return "is" if count == 1 else "are"
