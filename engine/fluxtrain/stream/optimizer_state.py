"""The adopted optimizer's state: the arenas themselves, under a key of our own.

torch casts per-parameter state to the parameter's dtype when it is loaded (bf16 moments); what
stands under another key is restored as it is. Plain `exp_avg` states are still taken in.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from fluxtrain.errors import MisusedModel
from fluxtrain.memory.group import Member
from fluxtrain.stream.parameter import Owner
from fluxtrain.stream.writes import fingerprint

if TYPE_CHECKING:
    from fluxtrain.stream.engine import Engine

KEY = "fluxtrain"
Entries = list[tuple[Owner, dict[str, Any], int]]


def attach_state(engine: Engine, optimizer: Optimizer, owners: Entries) -> None:
    """Put views of the arenas into `optimizer.state`, once state exists."""
    if optimizer.state.get(KEY) is not None:
        for owner, _, index in owners:
            entry = optimizer.state[KEY].get(index)
            if entry is not None:
                entry["step"] = owner.member.step
            elif owner.group.has_state and owner.member.step:
                optimizer.state[KEY][index] = _entry(owner.member)
        return
    held = {i: _entry(o.member) for o, _, i in owners if o.group.has_state and o.member.step}
    if not held:
        return
    optimizer.state[KEY] = held
    reference, weak_owners = weakref.ref(engine), owners

    def before_export(_: Optimizer) -> None:
        engine = reference()
        if engine is not None:
            engine.flush()
            for owner, _, index in weak_owners:
                entry = optimizer.state.get(KEY, {}).get(index)
                if entry is not None and "lo" in entry:
                    entry["weights"] = fingerprint(owner.group.home_views[owner.member.index])

    optimizer.register_state_dict_pre_hook(before_export)


def _entry(member: Member) -> dict[str, Any]:
    segment = member.segment
    assert segment.m is not None and segment.v is not None
    entry: dict[str, Any] = {
        "step": member.step,
        "exp_avg": member.slice(segment.m),
        "exp_avg_sq": member.slice(segment.v),
    }
    if segment.lo is not None:
        entry["lo"] = member.slice(segment.lo)
    return entry


def import_state(engine: Engine, optimizer: Optimizer, owners: Entries) -> None:
    """Take in what `load_state_dict` put into `optimizer.state` since the last step."""
    held = optimizer.state.get(KEY)
    by_index = {i: o for o, _, i in owners}
    foreign = held is not None and any(
        index not in by_index or not _is_ours(by_index[index].member, entry)
        for index, entry in held.items()
    )
    if held is not None and foreign:
        engine.flush()
        for index, entry in held.items():
            if index not in by_index:
                raise MisusedModel(
                    f"the loaded optimizer state names parameter {index}, and this optimizer has "
                    f"{len(by_index)} wrapped parameters: it belongs to another model"
                )
            _take(by_index[index], entry)
        del optimizer.state[KEY]
    for owner, options, _ in owners:
        for parameter in options["params"]:
            if parameter is owner.member.parameter and parameter in optimizer.state:
                plain = optimizer.state[parameter]
                if "exp_avg" in plain:
                    engine.flush()
                    _take(owner, plain)
                del optimizer.state[parameter]


def _is_ours(member: Member, entry: dict[str, Any]) -> bool:
    m = member.segment.m
    return m is not None and entry["exp_avg"].data_ptr() == member.slice(m).data_ptr()


def _take(owner: Owner, entry: dict[str, Any]) -> None:
    member, segment = owner.member, owner.member.segment
    if tuple(entry["exp_avg"].shape) != tuple(member.shape):
        raise MisusedModel(
            f"the loaded optimizer state for {member.name} has shape "
            f"{tuple(entry['exp_avg'].shape)}, the parameter {tuple(member.shape)}: it belongs to "
            "another model"
        )
    owner.group.ensure_state()
    assert segment.m is not None and segment.v is not None
    with torch.no_grad():
        member.slice(segment.m).copy_(entry["exp_avg"])
        member.slice(segment.v).copy_(entry["exp_avg_sq"])
        if segment.lo is not None:
            _take_lower_half(owner, segment.lo, entry)
    member.step = int(entry["step"])


def _take_lower_half(owner: Owner, lo: Tensor, entry: dict[str, Any]) -> None:
    """Only beside the very weights it was saved with; otherwise the masters are the weights."""
    weights = owner.group.home_views[owner.member.index]
    same = "lo" in entry and entry.get("weights", 0) == fingerprint(weights)
    if same:
        owner.member.slice(lo).copy_(entry["lo"])
    else:
        owner.member.slice(lo).zero_()
