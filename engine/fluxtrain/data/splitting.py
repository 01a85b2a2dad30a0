"""Chooses the documents held out for evaluation by their content, so the choice never changes."""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import blake2b

import numpy as np
import numpy.typing as npt

from fluxtrain.data.tokens import Tokens
from fluxtrain.errors import BadInput


@dataclass(frozen=True, slots=True, eq=False)
class Spans:
    """Parts of a token array, each within one document; in file order."""

    starts: npt.NDArray[np.int64]  # (S,)
    lengths: npt.NDArray[np.int64]  # (S,)

    @property
    def tokens(self) -> int:
        """Return how many tokens all spans have together."""
        return int(self.lengths.sum())


@dataclass(frozen=True, slots=True, eq=False)
class Split:
    """The spans to train on and those to evaluate on; no token is in both."""

    trained: Spans
    held_out: Spans


def split(tokens: Tokens, share: float, row_tokens: int, seed: int) -> Split:
    """Hold out at least `share` of the tokens by whole documents, and always leave some to train.

    Documents are taken in the order of a hash of their content and `seed`: equal documents fall on
    the same side, wherever they are in the file. If the last one exceeds the share by more than a
    row, only its end is held out; of a single document too only the end is held out.
    """
    if not 0.0 <= share < 1.0:
        raise BadInput(f"data.held_out is {share}: it is a share of the data, from 0 to below 1")
    starts, lengths = tokens.starts[:-1], np.diff(tokens.starts)
    held = np.zeros_like(lengths)  # how many tokens at the end of each document
    if share > 0.0:
        wanted = max(round(share * tokens.count), min(row_tokens, tokens.count // 2))
        wanted = min(wanted, tokens.count - 1)
        order = np.argsort(_keys(tokens, seed), kind="stable")
        reached = np.cumsum(lengths[order])
        place = int(np.searchsorted(reached, wanted))
        over = int(reached[place]) - wanted
        held[order[: place + 1]] = lengths[order[: place + 1]]
        if over > row_tokens or place == tokens.documents - 1:
            held[order[place]] -= over
    kept = lengths - held
    return Split(
        trained=Spans(starts[kept > 0], kept[kept > 0]),
        held_out=Spans((starts + kept)[held > 0], held[held > 0]),
    )


def _keys(tokens: Tokens, seed: int) -> npt.NDArray[np.uint64]:
    salt = seed.to_bytes(8, "little", signed=True)
    keys = np.empty(tokens.documents, dtype=np.uint64)
    for document in range(tokens.documents):
        start, end = tokens.starts[document : document + 2]
        digest = blake2b(tokens.ids[start:end].tobytes(), digest_size=8, key=salt).digest()
        keys[document] = int.from_bytes(digest, "little")
    return keys
