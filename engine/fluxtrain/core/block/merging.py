"""Rows that chunks compute one after another, put together to one tensor."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fluxtrain.core.device.device import Device
from fluxtrain.core.runtime.arrivals import note_arrivals


class Merging:
    """The rows of some tensors of a batch, by chunk.

    Where several cards compute (`hands_over`), every chunk is put into its rows at once, and the
    whole tensor says when they are there: the next block begins with them.
    """

    def __init__(self, device: Device, rows: int, *, hands_over: bool) -> None:
        self._device, self._rows, self._hands_over = device, rows, hands_over
        self._parts: dict[int, list[Tensor]] = {}
        self._whole: dict[int, Tensor] = {}
        self._pieces: dict[int, list[tuple[tuple[int, int], Any]]] = {}

    def add(self, place: int, span: tuple[int, int], part: Tensor) -> None:
        """Take the rows [first, stop) of the tensor at `place`, which the device has computed."""
        first, stop = span
        has_rows = part.dim() and part.shape[0] == stop - first
        if not self._hands_over or not has_rows or place in self._parts:
            self._parts.setdefault(place, self._taken_apart(place)).append(part)
            return
        part = part.detach()
        if stop - first == self._rows:
            self._whole[place] = part
        else:
            if place not in self._whole:
                self._whole[place] = part.new_empty((self._rows, *part.shape[1:]))
            self._whole[place][first:stop].copy_(part)
        self._pieces.setdefault(place, []).append((span, self._device.mark()))

    def _taken_apart(self, place: int) -> list[Tensor]:
        """Return what earlier chunks brought: they had as many rows as the chunk by chance."""
        if place not in self._whole:
            return []
        whole = self._whole.pop(place)
        return [whole[first:stop] for (first, stop), _ in self._pieces.pop(place)]

    def take(self, place: int) -> Tensor:
        """Return the whole tensor, once every chunk has brought its rows."""
        if place in self._whole:
            spans, points = zip(*self._pieces[place], strict=True)
            return note_arrivals(self._whole.pop(place), spans, points)
        parts = self._parts.pop(place)
        return parts[0] if len(parts) == 1 else torch.cat(parts)
