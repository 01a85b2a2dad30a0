"""Packed segments of a group: packed when weights move in, unpacked for each computation."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from fluxtrain.device.arena import aligned
from fluxtrain.memory.segment import Member, Segment
from fluxtrain.quantization.pack import pack
from fluxtrain.quantization.unpack import unpack


def pack_segment(segment: Segment, group: str) -> None:
    """Pack the weights of a segment's members, on the host, into the memory of `group`.

    Raises BadInput where a weight holds NaN or infinity.
    """
    layout, weights = segment.packed, segment.weights
    assert layout is not None and weights is not None
    on_host = weights.device.type == "cpu"
    packed = weights if on_host else torch.zeros(len(weights), dtype=torch.uint8)
    for index, member in enumerate(segment.members):
        pack(layout, index, member.parameter.detach(), packed, name=f"{group}.{member.name}")
    if packed is not weights:
        weights.copy_(packed)


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
        assert segment.weights is not None
        part = torch.empty(segment.elements, dtype=segment.dtype, device=segment.weights.device)
        unpack(segment.packed, segment.weights, part)
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
    """Make what a packed parameter holds at rest: NaN in its shape, of one element's memory."""
    weights = member.segment.weights
    device = torch.device("cpu") if weights is None else weights.device
    nan = torch.full((1,), torch.nan, dtype=member.segment.dtype, device=device)
    return nan.expand(member.shape)
