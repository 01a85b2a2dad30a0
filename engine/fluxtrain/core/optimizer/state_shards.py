"""A model's whole training state as shards, one a group, for checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fluxtrain.core.memory.group import Group
from fluxtrain.core.memory.segment import MASTERS, Member
from fluxtrain.core.ranks.shares import Shares
from fluxtrain.core.runtime.context import Context
from fluxtrain.errors import BadInput
from fluxtrain.plan.states import StateFormat

EXCHANGE = "exchange."  # begins the names of shards that a sharded model's compression keeps
_STEP, _BITS, _LOOSE = "step", "weight_bits", "loose"
_NAMES: dict[StateFormat, dict[str, str]] = {
    "fp32": {"m": "m", "v": "v"},
    "bf16": {"m": "m_bf16", "v": "v_bf16"},
    "8bit": {
        "m": "m_codes",
        "v": "v_codes",
        "m_scale": "m_scales",
        "v_scale": "v_scales",
    },
}


def shard_bytes(context: Context) -> int:
    """Return an upper bound of the bytes of all shards."""
    groups = sum(group.trained_bytes + group.state_bytes for group in context.groups)
    return groups + sum(parameter.nbytes for parameter in context.loose)


Read = Callable[[Tensor, Tensor], object]  # copies (to the host, from its source)


@dataclass(frozen=True)
class Held:
    """A group whose next update waits until its state is copied, or written."""

    copied: Future[None]
    on_device: bool
    read: Read  # of what is on a device, as it is now: on any thread, during the computation


def hold_for_saving(context: Context, name: str) -> Held | None:
    """Let the next update of a group wait until `Held.copied` has a result; None for a shard that
    must be copied at once: one of no group, or one partly on the host and partly on a device."""
    group = next((g for g in context.groups if g.name == name), None)
    if group is None or group.is_on("device", "state") != group.is_on("device"):
        return None
    device = context.cards[group.placement.card].device
    group.jobs.saving = Future()
    on_device = group.is_on("device", "state")
    read = partial(device.read, device.mark()) if on_device else Tensor.copy_
    return Held(group.jobs.saving, on_device, read)


def state_shards(context: Context) -> Iterator[tuple[str, dict[str, Tensor]]]:
    """Yield (shard name, tensors) of each group that trains: the weights of every trained
    parameter, the rest of its master, both moments and the step count.

    Waits for updates first. On the host the tensors are views of the arenas: write them out before
    the next optimizer step. Loose parameters have a shard of their own.

    Of groups that several processes share, rank 0 gets copies, one group at a time; the others,
    which must take all shards too, get empty ones. The weights that all see are no copies: they
    change once rank 0 has gone on.
    """
    context.flush()
    for group in context.groups:
        if group.trained and group.shares is not None:
            yield group.name, _gathered(group, group.shares)
        elif group.trained:
            yield group.name, _group_tensors(group)
    if context.loose:
        yield _LOOSE, {str(i): p.detach().cpu() for i, p in enumerate(context.loose)}


def weights_of_shard(name: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the weights of a shard by the names of their parameters in the model; loose ones as
    `loose.0`, `loose.1` in their order. An optimizer's own shard has none."""
    if name == _LOOSE:
        return {f"{_LOOSE}.{number}": tensor for number, tensor in tensors.items()}
    ends = f".{_BITS}"
    return {
        f"{name}.{key.removesuffix(ends)}": tensor
        for key, tensor in tensors.items()
        if key.endswith(ends)
    }


def load_state_shard(context: Context, name: str, tensors: dict[str, Tensor]) -> None:
    """Restore one shard exactly. Raises BadInput if it belongs to another model."""
    context.flush()
    if name.startswith(EXCHANGE):
        return
    if name == _LOOSE:
        for i, parameter in enumerate(context.loose):
            _copy(parameter.data, tensors, str(i), name)
        return
    group = next((g for g in context.groups if g.name == name), None)
    if group is None:
        raise BadInput(f"the checkpoint has a part {name!r} that this model does not have")
    expected = {key for member in group.members if member.trained for key in _keys(member)}
    extra = sorted(set(tensors) - expected)
    found = {f for f, names in _NAMES.items() for key in extra if key.endswith(f".{names['m']}")}
    if found:
        raise BadInput(
            f"the checkpoint's part {name!r} holds {found.pop()} optimizer states, and this model "
            f"is wrapped for {group.states}: use the states it was made with"
        )
    if extra:
        raise BadInput(
            f"the checkpoint's part {name!r} holds {extra[0]!r}, which this model does not have: "
            "it is of another model"
        )
    with torch.no_grad():
        for member in (member for member in group.members if member.trained):
            _copy(member.home, tensors, f"{member.name}.{_BITS}", name)
            member.write_version = member.parameter._version
            _load_state(context, group, member, tensors)
    if group.shares is not None:
        group.memory.forget_others(group.shares)
    group.weights_changed(frozen=False)


def _load_state(context: Context, group: Group, member: Member, tensors: dict[str, Tensor]) -> None:
    """Load masters, moments and step; moments of a shard from before the first step are zero."""
    step = tensors.get(f"{member.name}.{_STEP}", torch.zeros(1, dtype=torch.int64))
    if step.numel() != 1 or step.is_floating_point() or int(step) < 0:
        raise BadInput(f"the checkpoint's {group.name}.{member.name}.{_STEP} is no number of steps")
    member.step = int(step)
    context.owners[group][member.index].stepper = None  # any optimizer may go on
    if member.step:
        group.memory.ensure_state()
    for key, view in _states(member).items():
        if member.step:
            _copy(view, tensors, f"{member.name}.{key}", group.name)
        else:
            view.zero_()
    if not member.step and member.segment.has_state:
        member.segment.masters_are_weights(member)


def _keys(member: Member) -> list[str]:
    """Return the names of a member's tensors; they depend on the format of its moments."""
    keys = [_BITS, _STEP, *MASTERS, *_NAMES[member.segment.format].values()]
    return [f"{member.name}.{key}" for key in keys]


def _group_tensors(group: Group) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for member in group.members:
        if not member.trained:
            continue
        tensors[f"{member.name}.{_BITS}"] = member.home
        if group.has_state:
            tensors[f"{member.name}.{_STEP}"] = torch.tensor([member.step])
            for key, view in _states(member).items():
                tensors[f"{member.name}.{key}"] = view
    return tensors


def _gathered(group: Group, shares: Shares) -> dict[str, Tensor]:
    """Return the tensors of a group on rank 0, with what each process is home to; a collective."""
    tensors: dict[str, Tensor] = {}
    for segment in group.trained:
        assert segment.weights is not None
        flats = segment.states()
        if shares.memory is None:
            flats["weights"] = segment.weights
        whole: dict[str, Any] = {
            name: shares.at_first(flat, segment.elements) for name, flat in flats.items()
        }
        if not shares.ranks.is_first:
            continue
        there = replace(segment, **whole)
        for member in segment.members:
            one = replace(member, segment=there)
            tensors[f"{member.name}.{_BITS}"] = one.slice(there.stored_weights())
            if group.has_state:
                tensors[f"{member.name}.{_STEP}"] = torch.tensor([member.step])
                tensors |= {f"{member.name}.{key}": view for key, view in _states(one).items()}
    return tensors


def _states(member: Member) -> dict[str, Tensor]:
    names = _NAMES[member.segment.format]
    return {names.get(name, name): view for name, view in member.states().items()}


def _copy(to: Tensor, tensors: dict[str, Tensor], key: str, shard: str) -> None:
    source = tensors.get(key)
    if source is None:
        raise BadInput(f"the checkpoint's part {shard!r} lacks {key!r}: it is of another model")
    if source.shape != to.shape or source.dtype != to.dtype:
        raise BadInput(
            f"the checkpoint's {shard}.{key} is {tuple(source.shape)} {source.dtype}, this model's "
            f"{tuple(to.shape)} {to.dtype}: it is of another model"
        )
    to.copy_(source)
