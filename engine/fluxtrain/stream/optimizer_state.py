"""The adopted optimizer's state: the arenas themselves, under a key of our own.

torch casts per-parameter state to the parameter's dtype when it is loaded (bf16 moments); what
stands under another key is restored as it is. Plain `exp_avg` states are still taken in.
"""

from __future__ import annotations

import copy
import weakref
from collections import OrderedDict
from collections.abc import Iterable
from typing import Any

import torch
from torch.optim import Optimizer

from fluxtrain.errors import MisusedModel
from fluxtrain.memory.segment import MASTERS, Member
from fluxtrain.optim.dynamic_map import dequantise, quantise
from fluxtrain.stream.parameter import Owner, owner_of
from fluxtrain.stream.writes import check_writes, fingerprint

KEY = "fluxtrain"
_NAMES = {
    "m": "exp_avg",
    "v": "exp_avg_sq",
    "m_scale": "exp_avg_scale",
    "v_scale": "exp_avg_sq_scale",
}
Entries = list[tuple[Owner, dict[str, Any], int]]
_exporting: weakref.WeakSet[Optimizer] = weakref.WeakSet()


class _Held(dict[int, dict[str, Any]]):
    """What stands under our key. Copied or pickled, as `copy.deepcopy(optimizer)` does, it is first
    brought up to date, and is then a dict of a kind that `torch.load` takes as weights only."""

    def __init__(self, optimizer: Optimizer, entries: dict[int, dict[str, Any]]) -> None:
        super().__init__(entries)
        self._optimizer = weakref.ref(optimizer)

    def __deepcopy__(self, memo: dict[int, Any]) -> dict[int, dict[str, Any]]:
        return copy.deepcopy(self._plain(), memo)

    def __reduce_ex__(self, _: Any) -> tuple[Any, ...]:
        return OrderedDict, (), None, None, iter(self._plain().items())

    def _plain(self) -> dict[int, dict[str, Any]]:
        optimizer = self._optimizer()
        if optimizer is not None and held_state(optimizer) is self:
            _before_export(optimizer)
        return dict(self)


def wrapped_parameters(optimizer: Optimizer) -> Entries:
    """Owner, parameter group and index of every wrapped parameter, in the optimizer's order."""
    found: Entries = []
    index = 0
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            owner = owner_of(parameter)
            if owner is not None:
                found.append((owner, group, index))
            index += 1
    return found


def held_state(optimizer: Optimizer) -> dict[int, dict[str, Any]]:
    """What stands under our key: by parameter index, empty before the first step."""
    state: dict[Any, Any] = optimizer.state
    held: dict[int, dict[str, Any]] = state.get(KEY) or {}
    return held


def attach_state(optimizer: Optimizer, entries: Entries) -> None:
    """Put views of the arenas into `optimizer.state`, once state exists."""
    held = held_state(optimizer)
    state: dict[Any, Any] = optimizer.state
    for owner, _, index in entries:
        if index in held:
            held[index]["step"] = owner.member.step
        elif owner.member.step:
            held[index] = _entry(owner.member)
    if held:
        state[KEY] = held if isinstance(held, _Held) else _Held(optimizer, held)
    if optimizer not in _exporting:
        _exporting.add(optimizer)
        optimizer.register_state_dict_pre_hook(_before_export)


def renew_state(owners: Iterable[Owner]) -> None:
    """The parameters' states have moved to other memory: what stands under our key follows."""
    steppers = {owner.stepper() for owner in owners if owner.stepper is not None}
    for optimizer in steppers - {None}:
        assert optimizer is not None
        held = held_state(optimizer)
        for owner, _, index in wrapped_parameters(optimizer):
            if index in held:
                held[index] = _entry(owner.member)


def _before_export(optimizer: Optimizer) -> None:
    """Updates are done, and what completes a master says beside which weights it belongs."""
    held = held_state(optimizer)
    entries = wrapped_parameters(optimizer)
    for owner, _, _ in {id(e[0].group): e for e in entries}.values():
        owner.engine.flush()
        check_writes(owner.engine, owner.group)
    for owner, _, index in entries:
        entry = held.get(index)
        if not entry or entry["exp_avg"].data_ptr() != _moments_at(owner.member):
            continue
        entry["step"] = owner.member.step  # the last one may have been left out
        if any(name in entry for name in MASTERS):
            entry["weights"] = fingerprint(owner.group.home_views[owner.member.index])


def _entry(member: Member) -> dict[str, Any]:
    views = {_NAMES.get(name, name): view for name, view in member.states().items()}
    return {"step": member.step, **views}


def import_state(optimizer: Optimizer, entries: Entries) -> None:
    """Take in what `load_state_dict` put into `optimizer.state` since the last step."""
    by_index = {i: o for o, _, i in entries}
    ours = {_moments_at(o.member): i for i, o in by_index.items()}
    state: dict[Any, Any] = optimizer.state
    loaded = False
    for index, entry in held_state(optimizer).items():
        if index not in by_index:
            raise MisusedModel(
                f"the loaded optimizer state names parameter {index}, and this optimizer has "
                f"{len(by_index)} wrapped parameters: it belongs to another model"
            )
        place = ours.get(entry["exp_avg"].data_ptr())
        if place is None:
            loaded = True
            _take(by_index[index], entry)
        elif place != index:
            raise MisusedModel(
                f"parameter {index} of this optimizer is number {place} now: keep the order of its "
                "parameters (add new ones with add_param_group), or make a new optimizer"
            )
    if loaded:
        del state[KEY]  # the arenas hold it now
    if not any(isinstance(key, torch.Tensor) for key in state):
        return
    for owner, _, _ in entries:
        plain = state.pop(owner.member.parameter, None)
        if plain is not None and "exp_avg" in plain:
            _take(owner, plain)


def _moments_at(member: Member) -> int:
    m = member.segment.m
    if m is None or member.count == 0:
        return 0
    return m.data_ptr() + member.offset * m.itemsize


def _take(owner: Owner, entry: dict[str, Any]) -> None:
    member = owner.member
    if tuple(entry["exp_avg"].shape) != tuple(member.shape):
        raise MisusedModel(
            f"the loaded optimizer state for {owner.name} has shape "
            f"{tuple(entry['exp_avg'].shape)}, the parameter {tuple(member.shape)}: it belongs to "
            "another model"
        )
    owner.engine.flush()
    owner.group.ensure_state()
    with torch.no_grad():
        _take_moments(member, entry)
        _take_master(owner, entry)
    member.step = int(entry["step"])


def _take_moments(member: Member, entry: dict[str, Any]) -> None:
    """As they are, or from one format into another through fp32."""
    views = member.states()
    for name, signed in (("m", True), ("v", False)):
        key = _NAMES[name]
        to, source, scales = views[name], entry[key], entry.get(f"{key}_scale")
        if to.dtype == source.dtype:
            to.copy_(source)
            if scales is not None:
                views[f"{name}_scale"].copy_(scales)
            continue
        flat = source.reshape(-1).to(to.device)
        wide = flat.float()
        if scales is not None:
            wide = dequantise(flat, scales.to(to.device), signed=signed)
        if to.dtype == torch.uint8:
            codes, fresh = quantise(wide, signed=signed)
            to.copy_(codes.view(to.shape))
            views[f"{name}_scale"].copy_(fresh)
        else:
            to.copy_(wide.view(to.shape))


def _take_master(owner: Owner, entry: dict[str, Any]) -> None:
    """Only beside the very weights it was saved with; otherwise the masters are the weights."""
    views = owner.member.states()
    name = next((name for name in MASTERS if name in views), None)
    if name is None:
        return
    weights = owner.group.home_views[owner.member.index]
    if name in entry and entry.get("weights", 0) == fingerprint(weights):
        views[name].copy_(entry[name])
    else:
        owner.member.segment.masters_are_weights(owner.member)
