"""Chooses how many tokens a row has, from the lengths of the samples and the model's limits."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

SHORTEST, LONGEST_TEXT, LONGEST_TALK = 64, 2048, 4096  # of rows, where nobody says
WANTED_SHARE = 0.99  # of the samples fit
LEAST_ROWS = 16  # of texts, so that a step does not see all of them

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class RowLength:
    """A length of rows, with the reason."""

    tokens: int
    because: str


def choose_row_length(
    lengths: Ints, *, talks: bool, positions: int | None, share: float = 1.0
) -> RowLength:
    """Choose the shortest power of two that `WANTED_SHARE` of the samples fit into.

    `lengths` are the tokens of the first samples, a `share` of all; `positions` those that the
    model knows. Conversations (`talks`) get longer rows than texts, as they cannot be divided; few
    texts get shorter ones, as they can.
    """
    limit = LONGEST_TALK if talks else LONGEST_TEXT
    most = limit if positions is None else min(limit, positions)
    wanted = int(np.quantile(lengths, WANTED_SHARE, method="higher"))
    tokens = min(most, max(SHORTEST, 1 << max(0, wanted - 1).bit_length()))
    total = float(lengths.sum()) / share
    few = False
    while not talks and tokens > SHORTEST and total < LEAST_ROWS * tokens:
        tokens, few = tokens // 2, True
    tokens = max(2, min(tokens, int(lengths.sum())))
    fit = float((lengths <= tokens).mean())
    seen = " that were looked at" if share < 1 else ""
    longest = int(lengths.max())
    why = f"{fit:.1%} of {len(lengths):,} samples{seen} fit, the longest has {longest:,} tokens"
    if fit == 1.0:
        why += ", so none is cut or left out"
    if few:
        why += f"; longer rows would be fewer than {LEAST_ROWS}"
    elif tokens == positions and fit < WANTED_SHARE:
        why += f"; the model knows {positions:,} positions"
    elif fit < WANTED_SHARE:
        why += f"; longer rows than {limit:,} must be asked for"
    return RowLength(tokens, why)
