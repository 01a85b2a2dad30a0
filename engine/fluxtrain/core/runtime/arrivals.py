"""Rows of a tensor that are computed, or arrive from another card, one chunk after another."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from fluxtrain.core.device.device import Device
from fluxtrain.core.guards.shared_memory import version_of

_NAME = "_fluxtrain_arrivals"  # on the tensor object, which autograd hands on as it is


@dataclass(frozen=True)
class RowArrivals:
    """Points of a computation at which ranges of a tensor's rows are complete."""

    spans: tuple[tuple[int, int], ...]  # [first, stop) of each range
    points: tuple[Any, ...]  # of a device, as `Device.mark`
    version: int  # of the tensor when it was complete

    def __reduce__(self) -> tuple[Any, tuple[()]]:
        """Pickle as nothing, which any torch.load accepts: all rows have arrived."""
        return OrderedDict, ()

    def within(self, first: int, stop: int) -> list[Any]:
        """Return the points after which the rows [first, stop) are complete."""
        pairs = zip(self.spans, self.points, strict=True)
        return [point for (a, b), point in pairs if a < stop and first < b]


def note_arrivals(
    tensor: Tensor, spans: Sequence[tuple[int, int]], points: Iterable[Any]
) -> Tensor:
    """Remember when the tensor's rows are complete; return it."""
    setattr(tensor, _NAME, RowArrivals(tuple(spans), tuple(points), version_of(tensor)))
    return tensor


def arrivals_of(tensor: Tensor) -> RowArrivals | None:
    """Return when the tensor's rows are complete; None where unknown, or where code has written to
    the tensor since."""
    found = getattr(tensor, _NAME, None)
    return found if isinstance(found, RowArrivals) and found.version == version_of(tensor) else None


class ArgumentArrivals:
    """Waits for the arguments of a block that computes some rows at a time.

    Arrivals are noted before the block runs: once it writes in place, they no longer describe all
    rows.
    """

    def __init__(self, device: Device, tensors: Iterable[Tensor], cut: Iterable[bool]) -> None:
        """Note the tensors; `cut` names the ones that carry the batch's rows, the others are
        needed whole."""
        self._device = device
        self._known = [
            (arrivals, has_rows)
            for tensor, has_rows in zip(tensors, cut, strict=True)
            if (arrivals := arrivals_of(tensor)) is not None
        ]

    def wait_for(self, first: int, stop: int) -> None:
        """Make the device's computation wait for the tensors that rows [first, stop) need."""
        for arrivals, has_rows in self._known:
            for point in arrivals.within(first, stop) if has_rows else arrivals.points:
                self._device.wait_for(point)


def wait_for_rows(device: Device, tensor: Tensor, first: int, stop: int) -> None:
    """Make the device's computation wait for the rows [first, stop) of a tensor."""
    arrivals = arrivals_of(tensor)
    if arrivals is not None:
        for point in arrivals.within(first, stop):
            device.wait_for(point)


def wait_for_all(device: Device, tensors: Iterable[Tensor]) -> None:
    """Make the device's computation wait for all rows of these tensors."""
    for tensor in tensors:
        wait_for_rows(device, tensor, 0, 1 << 62)
