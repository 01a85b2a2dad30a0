"""Packed segments of a group: packed when weights move in, unpacked for each computation."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor, nn

from fluxtrain.core.device.arena import HostArena, aligned
from fluxtrain.core.device.disk import WeightsFile, sums_of
from fluxtrain.core.memory.mapped import drop
from fluxtrain.core.memory.segment import Member, Segment
from fluxtrain.core.quantization.layout import PackedLayout
from fluxtrain.core.quantization.packing import pack, unpack
from fluxtrain.plan.states import PackedFormat


@dataclass(frozen=True)
class PackedSource:
    """A weight packed by another package: its arrays, as a layout names them."""

    format: PackedFormat
    shape: tuple[int, ...]
    dtype: torch.dtype
    arrays: Mapping[str, Tensor]

    def copy_to(self, places: Mapping[str, Tensor]) -> None:
        """Copy the arrays into a packed segment."""
        with torch.no_grad():
            for name, place in places.items():
                place.copy_(self.arrays[name].reshape(-1)[: len(place)])


def packed_source(parameter: nn.Parameter) -> PackedSource | None:
    """Return a parameter's arrays packed by another package; None for ordinary parameters."""
    found: PackedSource | None = parameter.__dict__.get("_fluxtrain_packed")
    return found


class KeptWeights(Protocol):
    """Packed weights kept from an earlier start (quantization/packed_cache.py)."""

    def read_into(self, name: str, out: Tensor) -> bool:
        """Fill out (bytes,) uint8 on the host with the weights kept under a name, if any."""

    def add(self, name: str, packed: Tensor) -> None:
        """Keep packed (bytes,) uint8 under a name; it must not change before the end of packing."""

    def home_of(self, name: str, stored: Tensor | None) -> Path:
        """Return the file that begins with what is kept under a name, for weights that live there.
        `stored` (bytes,) uint8 is written to it first. Raises NoSpace where it cannot be."""


def pack_segment(
    segment: Segment, group: str, kept: KeptWeights | None = None, *, drops: bool = False
) -> None:
    """Pack the weights of a segment's members, on the host, into the memory of `group`, or read
    them from where they are `kept`. `drops`: pages of files that they were are given back.

    Raises BadInput where a weight holds NaN or infinity.
    """
    layout, weights = segment.packed, segment.weights
    assert layout is not None and weights is not None
    on_host = weights.device.type == "cpu"
    packed = weights if on_host else torch.zeros(len(weights), dtype=torch.uint8)
    name = kept_name(segment, group)
    if kept is None or not kept.read_into(name, packed):
        _pack_members(segment, layout, packed, group, drops=drops)
        if kept is not None:
            kept.add(name, packed)
    if packed is not weights:
        weights.copy_(packed)


def put_in_file(segment: Segment, group: str, kept: KeptWeights, *, drops: bool) -> None:
    """Make a file of `kept` the home of a frozen segment's weights: one that is there and whole, or
    a new one. The host holds them meanwhile, and not afterwards.

    Raises BadInput where a weight holds NaN or infinity and is packed, NoSpace, ReadFailed.
    """
    size, name = segment.size_bytes, kept_name(segment, group)
    stored = HostArena(size, pin=False).tensor(torch.uint8, size, 0)
    found = kept.read_into(name, stored)
    if not found and segment.packed is not None:
        _pack_members(segment, segment.packed, stored, group, drops=drops)
    elif not found:
        for member in segment.members:
            weight = member.parameter.detach()
            with torch.no_grad():
                member.slice(stored.view(segment.dtype)).copy_(weight)
            if drops:
                drop(weight)
    segment.file = WeightsFile(kept.home_of(name, None if found else stored), size, sums_of(stored))


def kept_name(segment: Segment, group: str) -> str:
    """Name a segment in a cache."""
    return f"{group} {segment.storage} {segment.dtype}"


def _pack_members(
    segment: Segment, layout: PackedLayout, packed: Tensor, group: str, *, drops: bool
) -> None:
    for index, member in enumerate(segment.members):
        source = member.parameter.__dict__.pop("_fluxtrain_packed", None)
        if source is not None:
            source.copy_to(layout.arrays_of(index, packed))
        else:
            weight = member.parameter.detach()
            pack(layout, index, weight, packed, name=f"{group}.{member.name}")
            if drops:
                drop(weight)


def unpack_group(segments: Iterable[Segment], flat: Tensor, dense: Tensor) -> None:
    """Compute the packed weights of a group's copy `flat` into `dense`, as `dense_parts` has it."""
    for segment, part in dense_parts(segments, dense):
        assert segment.packed is not None
        stop = segment.offset_bytes + segment.size_bytes
        unpack(segment.packed, flat[segment.offset_bytes : stop], part)


def all_dense_weights(segments: Iterable[Segment]) -> dict[int, Tensor]:
    """Compute the packed members' weights as they are computed with, by index in their group,
    where the group's weights are stored."""
    found: dict[int, Tensor] = {}
    for segment in segments:
        if segment.packed is None:
            continue
        weights = segment.stored_weights()
        part = torch.empty(segment.elements, dtype=segment.dtype, device=weights.device)
        unpack(segment.packed, weights, part)
        found |= {member.index: member.slice(part) for member in segment.members}
    return found


def dense_parts(segments: Iterable[Segment], dense: Tensor) -> Iterator[tuple[Segment, Tensor]]:
    """Yield each packed segment with its range (elements,) of `dense` (bytes,) uint8."""
    start = 0
    for segment in segments:
        if segment.packed is not None:
            yield segment, dense[start : start + segment.dense_bytes].view(segment.dtype)
            start += aligned(segment.dense_bytes)


def placeholder(member: Member) -> Tensor:
    """Make the data of a packed parameter, or one on disk, at rest: NaN in its shape, in the
    memory of one element."""
    weights = member.segment.weights
    device = torch.device("cpu") if weights is None else weights.device
    return without_values(member.shape, member.segment.dtype, device)


def without_values(
    shape: Sequence[int], dtype: torch.dtype, device: torch.device | None = None
) -> Tensor:
    """Make a tensor of NaN in the memory of one element."""
    return torch.full((1,), torch.nan, dtype=dtype, device=device).expand(tuple(shape))
