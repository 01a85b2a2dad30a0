"""Sparsifiers: some values are sent, with where they belong."""

from __future__ import annotations

import math
from copy import copy
from dataclasses import dataclass, field
from typing import Annotated, ClassVar

import torch
from pydantic import Field
from torch import Tensor

from fluxtrain.parallel.compress.compressor import Bias, Columns, Compressor, mixed
from fluxtrain.parallel.compress.quantised import Plain

Ratio = Annotated[float, Field(gt=0, le=1)]


@dataclass(frozen=True, kw_only=True)
class Sparse(Compressor):
    """Some values of a row; `values` encodes the chosen ones (`hybrid` puts a quantiser there)."""

    index_columns: ClassVar[int] = 1
    values: Compressor = field(default=Plain(), init=False)  # no option, so not of `init`

    def with_values(self, values: Compressor) -> Sparse:
        """Return the same with another encoding of the chosen values."""
        changed = copy(self)
        object.__setattr__(changed, "values", values)
        return changed

    def choose(self, rows: Tensor, draws: torch.Generator, kept: int) -> Tensor:
        """Return what is sent of the places, (R, ...) in int32."""
        return rows.abs().topk(kept, dim=1, sorted=False).indices.int()

    def places(self, sent: Tensor, count: int, kept: int) -> Tensor:
        """Return the places, (R, kept) in int64, of what is sent of them."""
        return sent.long()

    def sent_value(self, chosen: Tensor, count: int, agreed: float) -> Tensor:
        """Return the values to send in place of the chosen ones."""
        return chosen

    def encode(self, rows: Tensor, draws: torch.Generator, agreed: float = 0.0) -> Columns:
        """Send places, then values."""
        count = rows.shape[1]
        sent = self.choose(rows, draws, kept := self.kept(count, agreed))
        chosen = rows.gather(1, self.places(sent, count, kept))
        return sent, *self.values.encode(self.sent_value(chosen, count, agreed), draws)

    def decode(self, sent: Columns, count: int, agreed: float = 0.0) -> Tensor:
        """Put values at their places, and zeros elsewhere."""
        kept = self.kept(count, agreed)
        into = torch.zeros(sent[0].shape[0], count, device=sent[0].device)
        values = self.values.decode(sent[1:], kept)
        return into.scatter_(1, self.places(sent[0], count, kept), values)


def share_of(count: int, ratio: float) -> int:
    """Return how many of `count` values a ratio keeps: at least one."""
    return max(1, math.ceil(count * ratio))


@dataclass(frozen=True, kw_only=True)
class TopK(Sparse):
    """The largest values of each row."""

    name: ClassVar[str] = "topk"
    source: ClassVar[str] = "sparsified SGD with memory, arXiv 1809.07599"
    ratio: Ratio = 0.01

    def kept(self, count: int, agreed: float = 0.0) -> int:
        """Keep the ratio."""
        return share_of(count, self.ratio)


@dataclass(frozen=True, kw_only=True)
class RandomK(Sparse):
    """One value, drawn, of each stretch of 1 / ratio values; a seed is sent in place of places."""

    name: ClassVar[str] = "randomk"
    source: ClassVar[str] = (
        "random-k, arXiv 1809.07599, one of each stretch; scaled, arXiv 1710.09854"
    )
    bias: ClassVar[Bias] = "unbiased"
    ratio: Ratio = 0.01
    scale: bool = True  # by the length of a stretch, so that the mean is the value

    def _stretch(self, count: int) -> int:
        return min(count, max(1, round(1 / self.ratio)))

    def kept(self, count: int, agreed: float = 0.0) -> int:
        """Keep one of each stretch."""
        return -(-count // self._stretch(count))

    def choose(self, rows: Tensor, draws: torch.Generator, kept: int) -> Tensor:
        """Draw a seed for each row."""
        shape, top = (rows.shape[0], 1), torch.iinfo(torch.int32).max
        return torch.randint(top, shape, generator=draws, device=rows.device, dtype=torch.int32)

    def places(self, sent: Tensor, count: int, kept: int) -> Tensor:
        """Draw the places from each row's seed, by a hash that is the same on every device."""
        stretch = self._stretch(count)
        number = torch.arange(kept, device=sent.device)
        hashed = mixed(sent.long() + number * 0x9E3779B1)
        start = number * stretch
        return start + (hashed * self._lengths(count, number) >> 32)

    def _lengths(self, count: int, number: Tensor) -> Tensor:
        """Return the lengths of stretches by their numbers; the last may be shorter."""
        stretch = self._stretch(count)
        return (count - number * stretch).clamp(max=stretch)

    def sent_value(self, chosen: Tensor, count: int, agreed: float) -> Tensor:
        """Scale each value by the length of its stretch, where asked for."""
        if not self.scale:
            return chosen
        return chosen * self._lengths(count, torch.arange(chosen.shape[1], device=chosen.device))

    def refuses_feedback(self) -> str:
        """Refuse scaled values: the residual of a value that is sent is a multiple of it."""
        if not self.scale or self.ratio == 1:
            return ""
        return (
            f"randomk sends {1 / self.ratio:.3g} times each chosen value, so that its residual is "
            f"{1 / self.ratio - 1:.3g} times the value and grows from step to step: set "
            '"scale": false'
        )


@dataclass(frozen=True, kw_only=True)
class ThresholdV(Sparse):
    """Values of at least a threshold; rows are as long as the longest of all ranks needs."""

    name: ClassVar[str] = "thresholdv"
    work_bytes = 47
    source: ClassVar[str] = "threshold-v, Dutta et al., arXiv 1911.08250"
    extra_collectives: ClassVar[int] = 1
    threshold: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1e-4

    def proposal(self, rows: Tensor) -> Tensor:
        """Return the most values of a row that reach the threshold."""
        return (rows.abs() >= self.threshold).sum(1).amax().float()

    def kept(self, count: int, agreed: float = 0.0) -> int:
        """Keep as many as the ranks agreed on."""
        return min(count, max(1, int(agreed)))

    def sent_value(self, chosen: Tensor, count: int, agreed: float) -> Tensor:
        """Send zeros in place of values below the threshold."""
        return torch.where(chosen.abs() >= self.threshold, chosen, 0.0)


CHOOSING = (TopK, RandomK, ThresholdV)


@dataclass(frozen=True, kw_only=True)
class Sketch(Compressor):
    """Count sketches, which add up; the largest values of the sum are estimated from them."""

    name: ClassVar[str] = "sketch"
    work_bytes = 96
    source: ClassVar[str] = "FetchSGD, arXiv 2007.07682 (count sketch, one round)"
    tables: Annotated[int, Field(ge=1, le=15)] = 3
    ratio: Ratio = 0.25  # cells of all tables to values
    keep: Ratio = 0.02  # of the values

    def _width(self, count: int) -> int:
        return max(1, math.ceil(count * self.ratio / self.tables))

    def _cells(self, count: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return the cell of each value in each table, and its sign there: (tables, count)."""
        number = torch.arange(count, device=device)
        tables = torch.arange(1, 2 * self.tables, 2, device=device).unsqueeze(1)
        hashed = mixed((number + 1) * tables * 0x9E3779B1)
        return (hashed >> 1) % self._width(count), (hashed & 1) * 2.0 - 1

    def encode(self, rows: Tensor, draws: torch.Generator, agreed: float = 0.0) -> Columns:
        """Send the tables."""
        width = self._width(rows.shape[1])
        cells, signs = self._cells(rows.shape[1], rows.device)
        tables = torch.zeros(rows.shape[0], self.tables * width, device=rows.device)
        for table in range(self.tables):
            tables.index_add_(1, cells[table] + table * width, rows * signs[table])
        return (tables,)

    def decode(self, sent: Columns, count: int, agreed: float = 0.0) -> Tensor:
        """Take the median of each value's cells, and of these the largest."""
        tables = sent[0].unflatten(1, (self.tables, -1))
        cells, signs = self._cells(count, tables.device)
        found = [tables[:, t].index_select(1, cells[t]) * signs[t] for t in range(self.tables)]
        estimate = torch.stack(found).median(0).values
        places = estimate.abs().topk(share_of(count, self.keep), dim=1).indices
        return torch.zeros_like(estimate).scatter_(1, places, estimate.gather(1, places))

    def decode_sum(self, sent: Columns, count: int, agreed: float = 0.0) -> Tensor:
        """Add the tables up, then estimate the sum."""
        return self.decode((sent[0].sum(0, keepdim=True),), count)[0]

    def refuses_feedback(self) -> str:
        """Refuse: what the sum of sketches leaves out is known to no rank."""
        return (
            "the sum of all sketches is estimated, and no rank knows what of its own part that "
            "leaves out, so that residuals grow from step to step: take topk, which is exact in it"
        )
