"""A sample: the tokens of one document or one conversation, as the model is trained on them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from fluxtrain.data.row import Row

Ids = npt.NDArray[np.uint32]
Marks = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Sample:
    """Tokens with marks on those to train on. Marks of None: all are, but for the first one."""

    row: Row
    ids: Ids  # (N,)
    marks: Marks | None = None  # (N,)


def sample_of(row: Row, ids: list[int], marks: list[bool] | None = None) -> Sample:
    """Make a sample from lists of token ids and marks."""
    return Sample(
        row=row,
        ids=np.asarray(ids, dtype=np.uint32),
        marks=None if marks is None else np.asarray(marks, dtype=np.bool_),
    )
