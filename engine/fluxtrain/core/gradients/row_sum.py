"""Gradients of single rows of an embedding: their sum, their download, their place on the host."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import chain

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from fluxtrain.core.device.device import Device, Transfer
from fluxtrain.core.device.page_locks import host_empty
from fluxtrain.core.device.recorder import Instant
from fluxtrain.core.memory.rows import Places
from fluxtrain.core.ranks.exchange import Exchange

_INDEX = torch.int64


@dataclass(eq=False)
class RowSum:
    """The gradient of some rows of an embedding; other rows are zero, or stored elsewhere."""

    places: Places
    on_device: Tensor  # (U,) int64: `places.rows` on the device
    values: Tensor  # (U, H) on the device, in the weights' dtype; of several passes in fp32

    def plus(self, more: RowSum, device: Device, scale: float) -> RowSum:
        """Return this times `scale` plus `more`, in fp32, without waiting for the device."""
        mine, others = self.places.rows, more.places.rows
        rows = torch.unique(torch.cat([mine, others]))
        parts = [rows, torch.searchsorted(rows, mine), torch.searchsorted(rows, others)]
        host = host_empty((sum(map(len, parts)),), _INDEX, pin=device.pins)
        places = torch.cat(parts, out=host).to(device.torch_device, non_blocking=True)
        on_device, mine_at, others_at = places.split([len(part) for part in parts])
        shape = len(rows), self.values.shape[1]
        total = torch.zeros(shape, dtype=torch.float32, device=device.torch_device)
        before = self.values if scale == 1.0 else self.values * scale
        total.index_copy_(0, mine_at, before.float()).index_add_(0, others_at, more.values.float())
        return RowSum(Places(rows, rows[:0]), on_device, total)

    def norm(self, table_rows: int) -> Tensor:
        """Return the 2-norm (1,) in fp32 with the bits of `norm_by_rows` over the embedding."""
        return norm_by_rows(self.values, self.on_device, table_rows)

    def take_from(self, first: int, values: Tensor) -> None:
        """Copy this object's rows from `values` (n, H), the gradient from row `first` on."""
        mine, places = self._within(first, len(values))
        if len(mine):
            torch.index_select(values, 0, places, out=mine)

    def put_into(self, first: int, values: Tensor) -> None:
        """Copy this object's rows to `values` (n, H), the gradient from row `first` on."""
        mine, places = self._within(first, len(values))
        if len(mine):
            values.index_copy_(0, places, mine)

    def _within(self, first: int, count: int) -> tuple[Tensor, Tensor]:
        """Return the values of this object's rows among `count` rows from `first` on, and their
        positions there."""
        bounds = torch.searchsorted(self.places.rows, torch.tensor([first, first + count]))
        start, stop = bounds.tolist()
        return self.values[start:stop], self.on_device[start:stop] - first


def exchanged_rows(rows: RowSum, exchange: Exchange, dtype: torch.dtype) -> RowSum:
    """Return the rows that any process looked up, with the sum or mean of their gradients."""
    merged, total = exchange.gather_rows(rows.places.rows, rows.values)
    return RowSum(Places(merged, merged[:0]), merged.to(total.device), total.to(dtype))


class Scatter:
    """Puts rows into zeroed embedding gradients, and remembers the rows that are not zero there, so
    that the next call need not clear the whole gradient.

    A gradient that left the engine is cleared whole each time: writes through `.data`, numpy and
    collectives are not counted, also long after the gradient was handed out.
    """

    def __init__(self) -> None:
        self._filled: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
        self._seen: WeakTensorKeyDictionary = WeakTensorKeyDictionary()

    def fill(self, flat: Tensor, rows: Tensor, values: Tensor, table_rows: int) -> None:
        """Set `flat` (elements,), as (table_rows, H), to `values` (U, H) at `rows`, else zero."""
        embedding = flat[: table_rows * values.shape[1]].view(table_rows, values.shape[1])
        if (
            values.shape[1] * values.itemsize % _INDEX.itemsize == 0
        ):  # in 8-byte words: half the time
            embedding, values = embedding.view(_INDEX), values.view(_INDEX)
        before = self._rows_in(flat)
        if before is None or flat in self._seen:
            flat.zero_()
        else:
            embedding.index_fill_(0, before, 0)
        embedding.index_copy_(0, rows, values)
        self._filled[flat] = rows, flat._version

    def clear_ahead(self, flat: Tensor, on_their_way: Iterable[Iterable[Transfer]]) -> None:
        """Zero `flat` now if the next `fill` would have to, while the rows to fill it with are
        still being downloaded; waits for the transfers `on_their_way`, which may end there."""
        if self._rows_in(flat) is None and flat not in self._seen:
            for transfer in chain.from_iterable(on_their_way):
                transfer.wait_host()
            flat.zero_()
            self._filled[flat] = torch.empty(0, dtype=_INDEX), flat._version

    def _rows_in(self, flat: Tensor) -> Tensor | None:
        """Return all rows that may not be zero; None where other code wrote to `flat`."""
        before: tuple[Tensor, int] | None = self._filled.get(flat)
        return before[0] if before is not None and before[1] == flat._version else None

    def handed_out(self, flat: Tensor) -> None:
        """Note that code outside the engine has `flat`, or a view of it."""
        self._seen[flat] = True

    def forget(self, flat: Tensor) -> None:
        """Note that `flat` gets other values than rows."""
        self._filled.pop(flat, None)


class RowTransfer:
    """The download of rows of a gradient; it ends when they are in place on the host."""

    def __init__(self, transfer: Transfer, land: Callable[[], None]) -> None:
        self._transfer = transfer
        self._land: Callable[[], None] | None = land
        self._lock = threading.Lock()

    @property
    def duration_s(self) -> float | None:
        return self._transfer.duration_s

    def instants(self) -> tuple[Instant, Instant] | None:
        return self._transfer.instants()

    def done(self) -> bool:
        return self._transfer.done()

    def failed(self) -> bool:
        return self._transfer.failed()

    def wait_host(self) -> None:
        """Block until the bytes have arrived; the first thread that waits puts them in place."""
        self._transfer.wait_host()
        with self._lock:
            land, self._land = self._land, None
            if land is not None:
                land()

    def wait_compute(self, cause: str) -> None:
        self._transfer.wait_compute(cause)


def norm_by_rows(
    values: Tensor, places: Tensor | None = None, table_rows: int | None = None
) -> Tensor:
    """Return the 2-norm (1,) in fp32 of (U, H), from the norm of each row.

    `places` (U,) are the rows' positions in an embedding of `table_rows` rows whose other rows are
    zero; the result has the bits of the norm over all of it.
    """
    norms = torch.linalg.vector_norm(values, dim=1, dtype=torch.float32)
    if places is not None and table_rows is not None:
        norms = torch.zeros(table_rows, device=norms.device).index_copy_(0, places, norms)
    whole: Tensor = torch.linalg.vector_norm(norms)
    return whole.view(1)
