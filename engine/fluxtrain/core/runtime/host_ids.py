"""Host copies of the integer inputs that a model's forward moved to the device."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from fluxtrain.core.guards.arguments import flatten
from fluxtrain.core.guards.shared_memory import version_of


class HostIds:
    """The integers among a model's inputs, until its forward ends; after that a data loader may
    write the next batch into the same memory."""

    def __init__(self) -> None:
        # on the device, on the host, and their versions
        self._moved: list[tuple[Tensor, Tensor, tuple[int, int]]] = []

    def note(self, before: Any, after: Any) -> None:
        """Note the model's arguments from before and after they were moved."""
        pairs = zip(flatten(before)[1], flatten(after)[1], strict=True)
        self._moved = [
            (moved, host, (version_of(moved), version_of(host)))
            for host, moved in pairs
            if host.device.type == "cpu" and not host.is_floating_point()
        ]

    def forget(self) -> None:
        """Drop the inputs when the model's forward has ended."""
        self._moved = []

    def of(self, ids: Tensor) -> Tensor | None:
        """Return the same integers on the host, in the same order, if neither tensor was written to
        since; `ids` may be a view."""
        for moved, host, versions in self._moved:
            same = moved.data_ptr() == ids.data_ptr() and moved.numel() == ids.numel()
            plain = ids.is_contiguous() and moved.is_contiguous() and moved.dtype == ids.dtype
            if same and plain and (version_of(moved), version_of(host)) == versions:
                return host
        return None
