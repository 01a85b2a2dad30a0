"""The state of an optimizer that was taken over: views of the arenas, under a key of our own.

torch casts per-parameter state to the parameter's dtype when it is loaded (bf16 moments), but
restores entries under other keys unchanged. Plain `exp_avg` states are imported too;
plain_state.py converts back to them.
"""

from __future__ import annotations

import copy
import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from fluxtrain.core.adamw.dynamic_map import dequantise
from fluxtrain.core.adamw.kernels import quantise
from fluxtrain.core.guards.writes import check_writes, fingerprint
from fluxtrain.core.memory.segment import MASTERS, Member
from fluxtrain.core.memory.states_on_disk import OnDisk, loaded
from fluxtrain.core.runtime.context import Owner
from fluxtrain.core.runtime.parameter import owner_of
from fluxtrain.errors import DoesNotFit, MisusedModel
from fluxtrain.machine.machine import memory_left
from fluxtrain.plan.states import STATE_BLOCK
from fluxtrain.units import bytes_text

KEY = "fluxtrain"
NAMES = {
    "m": "exp_avg",
    "v": "exp_avg_sq",
    "m_scale": "exp_avg_scale",
    "v_scale": "exp_avg_sq_scale",
}
_MOST_STEPS = 1 << 53
_CURE = "load a whole optimizer state, of this model, or begin without one"
Entries = list[tuple[Owner, dict[str, Any], int]]
_exporting: weakref.WeakSet[Optimizer] = weakref.WeakSet()


def _nobody() -> None:
    return None


class StateEntries(dict[int, dict[str, Any]]):
    """The entries under our key. Copying or pickling (`copy.deepcopy(optimizer)`) first brings them
    up to date and gives a plain dict, which `torch.load` accepts with `weights_only=True`."""

    def __init__(
        self, entries: Mapping[int, dict[str, Any]], optimizer: Optimizer | None = None
    ) -> None:
        """Hold entries of an optimizer; without one, because accelerate builds dicts from entries
        alone."""
        super().__init__(entries)
        self._optimizer: Callable[[], Optimizer | None] = (
            _nobody if optimizer is None else weakref.ref(optimizer)
        )
        self._parameters: dict[int, weakref.ref[Tensor]] = {}

    def __deepcopy__(self, memo: dict[int, Any]) -> dict[int, dict[str, Any]]:
        return copy.deepcopy(self.up_to_date(), memo)

    def __reduce_ex__(self, _: Any) -> tuple[Any, ...]:
        return OrderedDict, (), None, None, iter(self.up_to_date().items())

    def belongs_to(self, optimizer: Optimizer) -> bool:
        """Return whether this optimizer's steps made the entries."""
        return self._optimizer() is optimizer

    def keep(self, parameters: Mapping[int, Tensor]) -> None:
        """Note the parameter of each entry: its index in the optimizer may change from here on."""
        self._parameters = {index: weakref.ref(each) for index, each in parameters.items()}

    def kept(self) -> dict[int, Tensor | None]:
        """Return the noted parameters by index; None for one that no longer exists."""
        return {index: parameter() for index, parameter in self._parameters.items()}

    def up_to_date(self) -> dict[int, dict[str, Any]]:
        """Wait for the updates under way and return the entries as a plain dict."""
        optimizer = self._optimizer()
        if optimizer is not None and held_state(optimizer) is self:
            _before_export(optimizer)
        return dict(self)


def wrapped_parameters(optimizer: Optimizer) -> Entries:
    """Return (owner, parameter group, index) of wrapped parameters, in the optimizer's order."""
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
    """Return the entries under our key by parameter index; empty before the first step."""
    return held_in(optimizer.state)


def held_in(state: dict[Any, Any]) -> dict[int, dict[str, Any]]:
    """Return the entries under our key of an optimizer's `state`, also of one in a state dict."""
    held = state.get(KEY) or {}
    if not isinstance(held, dict):
        raise MisusedModel(
            f"the loaded optimizer state has {type(held).__name__} under {KEY!r}, not a dict of "
            "entries by parameter: load a whole one, of this model, or begin without one"
        )
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
        mine = isinstance(held, StateEntries) and held.belongs_to(optimizer)
        state[KEY] = held if mine else StateEntries(held, optimizer)
    if optimizer not in _exporting:
        _exporting.add(optimizer)
        optimizer.register_state_dict_pre_hook(_before_export)


def steppers_of(owners: Iterable[Owner]) -> set[Optimizer]:
    """Return the optimizers that step these parameters."""
    found = (owner.stepper() for owner in owners if owner.stepper is not None)
    return {optimizer for optimizer in found if optimizer is not None}


def renew_state(owners: Iterable[Owner]) -> None:
    """Renew the views under our key after the parameters' states moved to other memory."""
    for optimizer in steppers_of(owners):
        held = held_state(optimizer)
        for owner, _, index in wrapped_parameters(optimizer):
            if index in held:
                held[index] = _entry(owner.member)


def _before_export(optimizer: Optimizer) -> None:
    """Bring the entries up to date before they are saved.

    Wait for updates, and add to each master's entry the fingerprint of the weights it completes.
    """
    held = held_state(optimizer)
    entries = wrapped_parameters(optimizer)
    for owner, _, _ in {id(e[0].group): e for e in entries}.values():
        owner.context.flush()
        check_writes(owner.group)
    for owner, _, index in entries:
        entry = held.get(index)
        if not entry or _pointer(entry) != _moments_at(owner.member):
            continue
        entry["step"] = owner.member.step  # the last step may have been skipped
        if any(name in entry for name in MASTERS):
            entry["weights"] = fingerprint(loaded(owner.member.home))
    _bring_home(held)


def bring_home(owners: Iterable[Owner]) -> None:
    """Copy the states of these parameters that are on disk to memory, for their optimizers; updates
    are done. Raises DoesNotFit."""
    for optimizer in steppers_of(owners):
        _bring_home(held_state(optimizer))


def _bring_home(held: dict[int, dict[str, Any]]) -> None:
    """Replace states on disk by copies in memory; the next step writes them back."""
    away = {i: e for i, e in held.items() if any(isinstance(v, OnDisk) for v in e.values())}
    states = [v for entry in away.values() for v in entry.values() if isinstance(v, OnDisk)]
    refuse_copies(sum(state.nbytes for state in states), "optimizer states")
    for index, entry in away.items():
        held[index] = {n: loaded(v) if isinstance(v, Tensor) else v for n, v in entry.items()}


def refuse_copies(size_bytes: int, what: str) -> None:
    """Raise DoesNotFit where the host has no room for copies of what lives on disk."""
    left = memory_left()
    if size_bytes and left is not None and size_bytes > left[1]:
        raise DoesNotFit(
            f"{bytes_text(size_bytes)} of {what} live on disk, and {bytes_text(left[1])} of "
            "host memory are left for a copy: read them one shard at a time, as checkpoints do "
            "(fluxtrain.engine_of(model).state_shards()), or use a machine with more memory"
        )


def _entry(member: Member) -> dict[str, Any]:
    views = {NAMES.get(name, name): view for name, view in member.states().items()}
    return {"step": member.step, **views}


def check_state(optimizer: Optimizer, entries: Entries) -> None:
    """Raise MisusedModel if `load_state_dict` put an incomplete state into `optimizer.state`."""
    owners = {index: owner for owner, _, index in entries}
    ours = {_moments_at(owner.member) for owner in owners.values()}
    for index, entry in held_state(optimizer).items():
        owner = owners.get(index)
        if owner is None:
            raise MisusedModel(
                f"the loaded optimizer state names parameter {index}, and this optimizer has "
                f"{len(owners)} wrapped parameters: it belongs to another model"
            )
        if _pointer(entry) not in ours:
            check_entry(owner.name, entry, owner.member.shape)
    for owner, _, _ in entries:
        plain = optimizer.state.get(owner.member.parameter)
        if plain and NAMES["m"] in plain:
            check_entry(owner.name, plain, owner.member.shape)


def import_state(optimizer: Optimizer, entries: Entries) -> None:
    """Copy the state that `load_state_dict` put into `optimizer.state` since the last step into
    the arenas. `check_state` must have passed."""
    by_index = {i: o for o, _, i in entries}
    ours = {_moments_at(o.member): i for i, o in by_index.items()}
    state: dict[Any, Any] = optimizer.state
    loaded = False
    for index, entry in held_state(optimizer).items():
        place = ours.get(_pointer(entry))
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
        if plain is not None and NAMES["m"] in plain:
            _take(owner, plain)


def _pointer(entry: object) -> Hashable:
    """Return the address of an entry's moments; -1 without moments."""
    moment = entry.get(NAMES["m"]) if isinstance(entry, dict) else None
    if isinstance(moment, OnDisk):
        return moment.place
    return moment.data_ptr() if isinstance(moment, torch.Tensor) else -1


def _moments_at(member: Member) -> Hashable:
    if member.segment.on_disk is not None and member.count:
        return _pointer(_entry(member))
    m = member.segment.m
    if m is None or member.count == 0:
        return 0
    return m.data_ptr() + member.offset * m.itemsize


def _take(owner: Owner, entry: dict[str, Any]) -> None:
    member = owner.member
    owner.context.flush()
    owner.group.memory.ensure_state()
    with torch.no_grad():
        _take_moments(member, entry)
        _take_master(owner, entry)
    member.step = int(entry["step"])


def _take_moments(member: Member, entry: dict[str, Any]) -> None:
    """Copy an entry's moments; convert through fp32 if their format differs."""
    views = member.states()
    for name in ("m", "v"):
        key = NAMES[name]
        to, source, scales = views[name], entry[key], entry.get(f"{key}_scale")
        if to.dtype == source.dtype:
            to.copy_(source)
            if scales is not None:
                views[f"{name}_scale"].copy_(scales)
            continue
        wide = wide_moment(entry, name).to(to.device)
        if to.dtype == torch.uint8:
            codes, fresh = quantise(wide, signed=name == "m")
            to.copy_(codes.view(to.shape))
            views[f"{name}_scale"].copy_(fresh)
        else:
            to.copy_(wide.view(to.shape))


def _take_master(owner: Owner, entry: dict[str, Any]) -> None:
    """Restore the master if it was saved with these weights, else make it from them."""
    views = owner.member.states()
    name = next((name for name in MASTERS if name in views), None)
    if name is None:
        return
    weights = loaded(owner.member.home)
    if name in entry and entry.get("weights", 0) == fingerprint(weights):
        views[name].copy_(entry[name])
    else:
        owner.member.segment.masters_are_weights(owner.member)


def check_entry(who: str, entry: object, shape: torch.Size | None) -> None:
    """Raise MisusedModel, naming `who`, if moments cannot be read from `entry`.

    shape: the parameter's; None if unknown.
    """
    what = f"the loaded optimizer state for {who}"
    if not isinstance(entry, Mapping):
        raise MisusedModel(f"{what} is of type {type(entry).__name__}, not a dict: {_CURE}")
    for key in ("step", NAMES["m"], NAMES["v"]):
        if key not in entry:
            raise MisusedModel(f"{what} has no {key!r}: {_CURE}")
    step = entry["step"]
    number = step.item() if isinstance(step, Tensor) and step.numel() == 1 else step
    if not isinstance(number, int | float) or not 0 <= number < _MOST_STEPS:
        raise MisusedModel(f"{what} counts {step!r} steps: {_CURE}")
    for key in (NAMES["m"], NAMES["v"], *(name for name in MASTERS if name in entry)):
        value = entry[key]
        if not isinstance(value, Tensor) or (shape is not None and value.shape != shape):
            found = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
            raise MisusedModel(
                f"{what} has {found} for {key!r}, and the parameter is {tuple(shape or ())}: it "
                "belongs to another model"
            )
        scales = entry.get(f"{key}_scale")
        blocks = -(-value.numel() // STATE_BLOCK)
        if value.dtype == torch.uint8 and (
            not isinstance(scales, Tensor) or scales.numel() != blocks
        ):
            raise MisusedModel(f"{what} has {key!r} in 8 bits without its {blocks} scales: {_CURE}")


def wide_moment(entry: Mapping[str, Any], which: str) -> Tensor:
    """Return the moment `which` (m, v) of an entry flat in fp32, whatever its format."""
    key = NAMES[which]
    flat: Tensor = entry[key].reshape(-1)
    scales = entry.get(f"{key}_scale")
    if flat.dtype == torch.uint8 and scales is not None:
        return dequantise(flat, scales.to(flat.device), signed=which == "m")
    return flat.float()


def plain_entry(entry: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return what torch's AdamW keeps for a parameter: `step` (), and moments in fp32 (shape of the
    parameter). Moments that are fp32 in `entry` share its memory."""
    moments = {NAMES[w]: wide_moment(entry, w).view(entry[NAMES[w]].shape) for w in ("m", "v")}
    return {"step": torch.tensor(float(entry["step"]), dtype=torch.float32), **moments}
