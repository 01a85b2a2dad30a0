"""Groups and machines that tests of the planner are made of."""

from __future__ import annotations

from typing import Any

from fluxtrain.plan.facts import Capacity, GroupFacts
from fluxtrain.units import GIB


def group(name: str, elements: int, **facts: Any) -> GroupFacts:
    """A block (`layers.N`) or an edge of bf16 weights, all trained; any fact can be given."""
    kind = "block" if name.startswith("layers") else "edge"
    size = {"weight_bytes": 2 * elements, "trained_bf16": elements}
    return GroupFacts(**({"name": name, "kind": kind} | size | facts))


def room(device_gib: float | None, host_gib: float | None = 64.0) -> Capacity:
    """The free memory of a machine; no device_gib: without a GPU."""
    device, host = (None if gib is None else int(gib * GIB) for gib in (device_gib, host_gib))
    return Capacity(device_free_bytes=device, host_available_bytes=host)
