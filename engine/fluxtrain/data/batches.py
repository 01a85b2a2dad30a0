"""Batches in a shuffled order that depends on seed and epoch alone, with an exact cursor."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fluxtrain.data.packing import Ints, PackedRows, Rows
from fluxtrain.data.splitting import Order
from fluxtrain.errors import BadInput

SORTED_TOGETHER = 1024  # rows that are not packed, by their length
SERVED_TOGETHER = 32  # rows of like lengths, one after the other


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Batch:
    """The rows of one forward and backward pass; tensors are int64 on the CPU."""

    input_ids: Tensor  # (B, T)
    labels: Tensor  # (B, T), not shifted; -100 where not trained
    position_ids: Tensor  # (B, T), restart with every document
    predicted: int  # labels in this batch
    tokens: int  # not padding
    packed: bool = True
    mixes: bool = field(init=False)  # a row holds several documents, which must not see each other

    def __post_init__(self) -> None:
        restarts = torch.diff(self.position_ids, dim=-1) != 1
        object.__setattr__(self, "mixes", self.packed and bool(restarts.any()))

    def inputs(self, step_predicted: int | None = None) -> dict[str, Any]:
        """Return keyword arguments for a Hugging Face causal model.

        The summed loss is divided by `step_predicted`, the labels of all batches of an optimizer
        step; None: by the labels of this batch. The cache is off because with one the model no
        longer separates packed documents.
        """
        arguments: dict[str, Any] = {
            "input_ids": self.input_ids,
            "labels": self.labels,
            "num_items_in_batch": self.predicted if step_predicted is None else step_predicted,
            "use_cache": False,
        }
        if self.packed:
            arguments |= {"position_ids": self.position_ids, "attention_mask": None}
        return arguments


def refuse_larger_step(
    batch_rows: int, accumulation: int, rows: int, row_tokens: int, *, estimated: bool = False
) -> None:
    """Raise BadInput for a step of more than all `rows` of the data.

    `estimated`: there may be as many again.
    """
    if batch_rows * accumulation > rows * (1 + estimated):
        sizes = {"train.batch_rows": batch_rows, "train.accumulation": accumulation}
        lower = ", ".join(name for name, size in sizes.items() if size > 1)
        raise BadInput(
            f"a step takes {batch_rows} x {accumulation} = {batch_rows * accumulation} rows "
            f"and the data has {'about ' * estimated}{rows} of {row_tokens} tokens: lower "
            f"{lower}{', ' if lower else ''}data.sequence_length or data.held_out, or add data"
        )


class BatchSource:
    """Endless batches of a split: a batch may span two epochs, and no row is dropped.

    One optimizer step takes `accumulation` batches of `batch_rows` rows. The cursor is
    (epoch, position); a source restored from it yields the same batches as the original.

    Rows that are not packed come in groups of like lengths, and a batch is as long as its longest.
    """

    def __init__(
        self, rows: PackedRows, batch_rows: int, accumulation: int = 1, seed: int = 0
    ) -> None:
        refuse_larger_step(batch_rows, accumulation, len(rows), rows.sequence_length)
        self.rows = rows
        self.batch_rows = batch_rows
        self.accumulation = accumulation
        self.seed = seed
        self._epoch = 0
        self._position = 0  # rows of this epoch already served
        self._order = _RowOrder(rows, seed, 0)
        self._fingerprint = rows.fingerprint()

    @property
    def step_rows(self) -> int:
        """Return the rows of one optimizer step."""
        return self.batch_rows * self.accumulation

    @property
    def steps_per_epoch(self) -> int:
        """Return the steps until each row was seen once, the last step whole."""
        return -(-len(self.rows) // self.step_rows)

    @property
    def epoch(self) -> float:
        """Return the epochs done, with the fraction of the current one."""
        return self._epoch + self._position / len(self.rows)

    def next_step(self) -> list[Batch]:
        """Return all batches of the next optimizer step."""
        indices = [self._next_indices() for _ in range(self.accumulation)]
        parts = [self.rows.take(taken, trim=True) for taken in indices]
        return [_batch(part, self.rows.packed) for part in parts]

    def state_dict(self) -> dict[str, Any]:
        """Return the cursor, JSON-ready."""
        return {
            "epoch": self._epoch,
            "position": self._position,
            "seed": self.seed,
            "rows": len(self.rows),
            "fingerprint": self._fingerprint,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a cursor; the batch size may differ.

        Raises BadInput when the cursor belongs to other data or to another seed.
        """
        if state["fingerprint"] != self._fingerprint:
            raise BadInput(
                f"the checkpoint was made with other data ({state['rows']} rows, now "
                f"{len(self.rows)}): use the same file, data.* settings and tokenizer, "
                "or start a new run"
            )
        if state["seed"] != self.seed:
            raise BadInput(
                f"the checkpoint's order of rows has seed {state['seed']} and this run has "
                f"{self.seed}: use the same seed, or start a new run"
            )
        self._epoch, self._position = state["epoch"], state["position"]
        self._order = _RowOrder(self.rows, self.seed, self._epoch)

    def _next_indices(self) -> Ints:
        taken = self._order.between(self._position, self._position + self.batch_rows)
        self._position += self.batch_rows
        if self._position >= len(self.rows):
            self._epoch += 1
            self._position -= len(self.rows)
            self._order = _RowOrder(self.rows, self.seed, self._epoch)
            taken = np.concatenate([taken, self._order.between(0, self._position)])
        return taken


class _RowOrder:
    """The order of an epoch. It does not depend on the size of a batch, so a resume may change it.

    Rows that are not packed are sorted by length, `SORTED_TOGETHER` of the shuffled ones at a time,
    and served in shuffled groups of `SERVED_TOGETHER`.
    """

    def __init__(self, rows: PackedRows, seed: int, epoch: int) -> None:
        self._rows = rows
        self._order = Order(len(rows), seed, epoch)
        self._seed = seed + epoch
        self._window = -1
        self._grouped: Ints = np.zeros(0, dtype=np.int64)

    def between(self, first: int, last: int) -> Ints:
        """Return the rows at the places from `first` to before `last`; none beyond the end."""
        if self._rows.packed:
            return self._order.between(first, last)
        last = min(last, len(self._order))
        parts = [np.zeros(0, dtype=np.int64)]
        while first < last:
            window, within = divmod(first, SORTED_TOGETHER)
            parts.append(self._of_window(window)[within : within + last - first])
            first += len(parts[-1])
        return np.concatenate(parts)

    def _of_window(self, window: int) -> Ints:
        if window != self._window:
            start = window * SORTED_TOGETHER
            rows = self._order.between(start, start + SORTED_TOGETHER)
            rows = rows[np.argsort(self._rows.row_lengths(rows), kind="stable")]
            groups = -(-len(rows) // SERVED_TOGETHER)
            order = Order(groups, self._seed, window).between(0, groups)
            parts = [rows[g * SERVED_TOGETHER : (g + 1) * SERVED_TOGETHER] for g in order]
            self._window, self._grouped = window, np.concatenate(parts)
        return self._grouped


def in_order(rows: PackedRows, batch_rows: int) -> Iterator[Batch]:
    """Yield every row once in a fixed order, for evaluation; the last batch may be smaller."""
    for first in range(0, len(rows), batch_rows):
        part = rows.take(np.arange(first, min(first + batch_rows, len(rows))), trim=True)
        yield _batch(part, rows.packed)


def typical_batch(rows: PackedRows, count: int) -> Batch:
    """Return `count` rows from all over the split, or all if fewer, as long as any row can be.

    Packing puts the longest documents into the first rows, which are unlike those of most batches:
    a row of one document needs no attention mask.
    """
    taken = min(count, len(rows))
    return _batch(rows.take((np.arange(taken) * 2 + 1) * len(rows) // (2 * taken)), rows.packed)


def fullest_batch(rows: PackedRows, count: int) -> Batch | None:
    """Return the `count` rows with the most documents, whose attention masks take memory.

    None where typical rows hold several documents themselves, or no rows do.
    """
    if not rows.mixes or typical_batch(rows, count).mixes:
        return None
    return _batch(rows.take(rows.fullest(count)), rows.packed)


def _batch(rows: Rows, packed: bool) -> Batch:
    return Batch(
        input_ids=torch.from_numpy(rows.input_ids),
        labels=torch.from_numpy(rows.labels),
        position_ids=torch.from_numpy(rows.position_ids),
        predicted=rows.predicted,
        tokens=rows.tokens,
        packed=packed,
    )
