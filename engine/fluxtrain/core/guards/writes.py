"""Detect writes to weights from outside the engine: loading, merging, pruning, other optimizers.

A write to a bf16 or fp16 weight makes its fp32 master stale (123 of 256 externally zeroed weights
stayed frozen in an experiment), and a copy on the device out of date.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fluxtrain.core.memory.group import Group
from fluxtrain.core.memory.segment import Member
from fluxtrain.errors import MisusedModel

_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_SLICE_WORDS = 1 << 22


def fingerprint(tensor: Tensor) -> int:
    """Return a number that changes when a weight does: a position-weighted sum of raw words."""
    words = tensor.detach().reshape(-1).view(_WORDS[tensor.element_size()])
    total = torch.zeros((), dtype=torch.int64, device=words.device)
    for start in range(0, words.numel(), _SLICE_WORDS):  # int64 copies of a slice at a time
        part = words[start : start + _SLICE_WORDS].to(torch.int64)
        places = torch.arange(start + 1, start + 1 + part.numel(), device=words.device)
        total += (part * (places * 2654435761 % 4294967291)).sum()
    return int(total)


def watch(member: Member) -> None:
    """Note a weight's value when its `.data` is read: writes through `.data` are not counted."""
    if member.fingerprint is None:
        with torch._C.DisableTorchFunctionSubclass():
            member.fingerprint = fingerprint(member.parameter)


def check_writes(group: Group) -> None:
    """Take over writes to the group's weights since the last check."""
    changed: list[Member] = []
    with torch._C.DisableTorchFunctionSubclass():
        for member, host in zip(group.members, group.memory.views, strict=True):
            parameter = member.parameter
            if parameter.data_ptr() != host.data_ptr():
                _take_over(group, member, host)
                changed.append(member)
            elif parameter._version != member.write_version or (
                member.fingerprint is not None and fingerprint(host) != member.fingerprint
            ):
                changed.append(member)
            elif member.fingerprint is None:
                continue  # nearly always
            member.write_version = parameter._version
            member.fingerprint = None
    if changed:
        group.jobs.wait_for_weights()
        group.weights_changed(frozen=not all(member.trained for member in changed))
        for member in changed:
            member.segment.masters_are_weights(member)


def _take_over(group: Group, member: Member, host: Tensor) -> None:
    """Undo `parameter.data = tensor`: copy the values to the host, and set `.data` to these."""
    parameter = member.parameter
    if not member.segment.has_values:
        how = f"packed as {member.segment.storage}" if member.segment.packed else "on disk"
        raise MisusedModel(
            f"{member.name} in {group.name} is {how} and was given "
            "other values: change weights before fluxtrain.wrap(model), or fluxtrain.unwrap(model) "
            "first"
        )
    same = parameter.shape == host.shape and parameter.dtype == host.dtype
    if not same or parameter.device.type != host.device.type:
        raise MisusedModel(
            f"{member.name} in {group.name} was {tuple(host.shape)} {host.dtype} on {host.device} "
            f"and is now {tuple(parameter.shape)} {parameter.dtype} on {parameter.device}: resize "
            "or convert before fluxtrain.wrap(model), or fluxtrain.unwrap(model) first"
        )
    group.jobs.wait_for_weights()
    with torch.no_grad():
        host.copy_(parameter.detach())
    parameter.data = host
