"""The distinct rows of a large embedding that a batch looks up: uploads and gradient memory.

A batch of T tokens looks up at most T rows of an embedding, of 150 thousand. Only these rows are
copied to the device, and only their gradients are downloaded; all other gradients are zero.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from fluxtrain.core.device.arena import HostArena, aligned, device_flat
from fluxtrain.core.device.device import Device, Transfer

_INDEX = torch.int64
Gather = Callable[[Tensor, Tensor], object]  # rows (U,), and (U, H) on the host for their weights


@dataclass(frozen=True, eq=False)
class Places:
    """Which rows a batch looks up, and the position of each token's row among them."""

    rows: Tensor  # (U,) int64 on the host, ascending
    of_tokens: Tensor  # (T,) int64 on the host: positions in `rows`

    @staticmethod
    def of(indices: Tensor) -> Places:
        """Find the places of `indices` (T,) on the host, of any integer dtype."""
        rows, of_tokens = torch.unique(indices.to(_INDEX), return_inverse=True)
        return Places(rows, of_tokens)

    @property
    def count(self) -> int:
        return len(self.rows)

    def position_of(self, row: int) -> int:
        """Return the position of `row` among the rows; -1 where it is not looked up."""
        at = int(torch.searchsorted(self.rows, row))
        return at if at < self.count and int(self.rows[at]) == row else -1


@dataclass(frozen=True, eq=False)
class UploadedRows:
    """Rows on the device, with each token's index among them."""

    rows: Tensor  # (U, H): valid until `RowBuffers.release`
    places: Tensor  # (U,) int64
    of_tokens: Tensor  # (T,) int64


class Awaited(Protocol):
    """A lookup that may get a gradient."""

    places: Places
    uploaded: UploadedRows | None  # its indices stay valid


class RowBuffers:
    """Buffers for the rows of one embedding; they grow to the largest batch and stay."""

    def __init__(self, device: Device, table_rows: int, width: int, dtype: torch.dtype) -> None:
        self._device = device
        self.table_rows, self.width, self.dtype = table_rows, width, dtype
        self.capacity = 0  # rows
        self._tokens = 0
        self._arenas: tuple[HostArena, HostArena] | None = None  # rows, indices
        self._landing: HostArena | None = None
        self._arriving: list[tuple[Transfer, HostArena]] = []  # to `_landing` and earlier ones
        self._on_device: tuple[Tensor, Tensor] | None = None
        self._transfers: tuple[Transfer, ...] = ()
        self._free: object = None
        self.awaited: weakref.WeakSet[Awaited] = weakref.WeakSet()  # lookups to be differentiated

    @property
    def row_bytes(self) -> int:
        return self.width * self.dtype.itemsize

    @property
    def device_bytes(self) -> int:
        return sum(t.nbytes for t in self._on_device or ())

    @property
    def host_bytes(self) -> int:
        arenas = (*(self._arenas or ()), self._landing)
        return sum(arena.size_bytes for arena in arenas if arena is not None)

    def upload(
        self, places: Places, gather: Gather
    ) -> tuple[UploadedRows, tuple[Transfer, Transfer]]:
        """Gather the rows on the host and start to copy them to the device. The computation must
        wait for both transfers, and `release` the rows afterwards.

        Waits for the copies of the previous rows, which use the same host memory. Raises IndexError
        for a row that the embedding does not have.
        """
        if places.count and not 0 <= int(places.rows[0]) <= int(places.rows[-1]) < self.table_rows:
            raise IndexError(
                f"ids from {int(places.rows[0])} to {int(places.rows[-1])} are looked up in an "
                f"embedding of {self.table_rows} rows"
            )
        for transfer in self._transfers:
            transfer.wait_host()
        self._grow(places)
        assert self._arenas is not None
        assert self._on_device is not None
        count, numbers = places.count, places.count + len(places.of_tokens)
        rows = self._table(self._arenas[0])[:count]
        gather(places.rows, rows)
        indices = self._arenas[1].tensor(_INDEX, self.capacity + self._tokens, 0)[:numbers]
        indices[:count] = places.rows
        indices[count:] = places.of_tokens
        to_rows = self._on_device[0][: rows.nbytes].view(self.dtype).view(count, self.width)
        to_indices = self._on_device[1][: indices.nbytes].view(_INDEX)
        self._transfers = found = (
            self._device.upload(to_indices, indices, None, self._free, urgent=True),
            self._device.upload(to_rows, rows, None, self._free, urgent=True),
        )
        return UploadedRows(to_rows, to_indices[:count], to_indices[count:]), found

    def release(self) -> None:
        """Let the rows be overwritten once the computation queued so far has run."""
        self._free = self._device.mark()

    def landing(self, values: Tensor) -> tuple[Tensor, HostArena]:
        """Return host memory (U, H) for gradients of rows, and the arena that keeps it locked."""
        size_bytes = max(self.capacity * self.row_bytes, values.nbytes)
        if self._landing is None or self._landing.size_bytes < size_bytes:
            self._landing = HostArena(size_bytes, pin=self._device.pins)
        flat = self._landing.tensor(values.dtype, values.numel(), 0)
        return flat.view(values.shape), self._landing

    def arrives(self, transfer: Transfer) -> None:
        """Keep the landing memory until a copy to it has ended, also where a larger arena replaces
        it meanwhile."""
        assert self._landing is not None
        under_way = [(t, arena) for t, arena in self._arriving if not (t.done() or t.failed())]
        self._arriving = [*under_way, (transfer, self._landing)]

    def give_back(self) -> None:
        """Wait for the copies under way and free all buffers; the next lookup allocates anew."""
        for transfer in self._transfers:
            transfer.wait_host()
        for transfer, _ in self._arriving:
            transfer.wait_host()
        self._transfers, self._arriving = (), []
        self._arenas = self._landing = self._on_device = None
        self.capacity = self._tokens = 0

    def _table(self, arena: HostArena) -> Tensor:
        """Return the arena's memory as rows (capacity, H)."""
        flat = arena.tensor(self.dtype, self.capacity * self.width, 0)
        return flat.view(self.capacity, self.width)

    def _grow(self, places: Places) -> None:
        """Enlarge the buffers to this many tokens: the distinct ones vary from batch to batch."""
        tokens = max(len(places.of_tokens), 1)
        if tokens <= self._tokens:
            return
        self._arenas = self._on_device = None  # freed before the larger ones are allocated
        self._tokens, self.capacity = tokens, min(tokens, self.table_rows)
        sizes = (
            aligned(self.capacity * self.row_bytes),
            aligned((self.capacity + tokens) * _INDEX.itemsize),
        )
        pin, target = self._device.pins, self._device.torch_device
        self._arenas = (HostArena(sizes[0], pin=pin), HostArena(sizes[1], pin=pin))
        with torch.inference_mode(False):  # they stay for training passes that come later
            fresh = (self._device.for_copies(device_flat(target, size)) for size in sizes)
            self._on_device = (next(fresh), next(fresh))
        self._free = self._device.mark()
