"""Converts the state of an optimizer that was taken over to torch's own layout.

torch's AdamW ignores the entries under our key and would begin with moments of zero instead.
This happens when a state dict of a wrapped model is loaded for a plain one, when model and
optimizer were copied or pickled together, and when an optimizer outlives `unwrap`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from itertools import chain
from typing import Any

from torch import Tensor
from torch.optim import Adam, AdamW, Optimizer

from fluxtrain.core.optimizer.optimizer_state import (
    KEY,
    StateEntries,
    check_entry,
    held_in,
    held_state,
    plain_entry,
    steppers_of,
    wrapped_parameters,
)
from fluxtrain.core.runtime.context import Owner
from fluxtrain.core.runtime.parameter import owner_of
from fluxtrain.errors import BadInput, MisusedModel


def make_plain(optimizer: Optimizer, but: Collection[int] = ()) -> None:
    """Give each parameter the moments and the step count of its entry under our key.

    but: indices of the parameters whose entries stay unchanged.
    Moments get the parameter's dtype and device, as in torch's own states. Raises MisusedModel if
    an entry does not fit its parameter, or if the optimizer is no AdamW without amsgrad.
    """
    if KEY not in optimizer.state:
        return
    held = held_state(optimizer)
    indices = held.keys() - set(but)
    if not indices:
        return
    owned = isinstance(held, StateEntries) and held.belongs_to(optimizer)
    entries = held.up_to_date() if isinstance(held, StateEntries) else held
    parameters = dict(enumerate(chain(*(group["params"] for group in optimizer.param_groups))))
    if owned and isinstance(held, StateEntries):
        kept = held.kept()
        parameters = {i: p for i, p in parameters.items() if i not in kept}
        parameters |= _still_stepped(kept, optimizer)
        indices = {index for index in indices if index in parameters or index not in kept}
    _check(optimizer, entries, indices, parameters)
    counted = {
        id(parameter)
        for group in optimizer.param_groups
        if group.get("capturable") or group.get("fused")
        for parameter in group["params"]
    }  # torch counts the steps of these on their device
    state: dict[Any, Any] = optimizer.state
    for index in indices:
        parameter = parameters[index]
        # nothing else uses the moments in the arenas of an unwrapped model
        shared = owned and owner_of(parameter) is None
        plain = {
            name: value
            if name == "step"
            else value.to(parameter.device, parameter.dtype, copy=not shared)
            for name, value in plain_entry(entries[index]).items()
        }
        if id(parameter) in counted:
            plain["step"] = plain["step"].to(parameter.device)
        state[parameter] = plain
    rest = {index: entry for index, entry in entries.items() if index in but}
    del state[KEY]
    if rest:
        state[KEY] = rest


def _still_stepped(kept: Mapping[int, Tensor | None], optimizer: Optimizer) -> dict[int, Tensor]:
    """Return the noted parameters that the optimizer still steps, at whatever index they are now.
    The entries of all others are dropped; torch ignores such entries too."""
    stepped = {id(p) for group in optimizer.param_groups for p in group["params"]}
    return {i: p for i, p in kept.items() if p is not None and id(p) in stepped}


def plain_optimizer_state(state_dict: dict[str, Any]) -> dict[str, Any]:
    """Convert an optimizer's `state_dict()` to that of torch's AdamW, for use without FluxTrain.

    Moments are converted to fp32 and master weights are left out. Moments that are fp32 already
    share memory with the given `state_dict`, which shares it with the optimizer. A state dict
    without our entries is returned unchanged. Raises BadInput if entries are incomplete.
    """
    given: Any = state_dict
    state = given.get("state") if isinstance(given, dict) else None
    if not isinstance(state, dict):
        raise BadInput("plain_optimizer_state takes what an optimizer's state_dict() returns")
    held = held_in(state)
    if not held:
        return state_dict
    entries = held.up_to_date() if isinstance(held, StateEntries) else held
    names = {index: f"parameter {index}" for index in entries}
    for index, entry in entries.items():
        check_entry(names[index], entry, None)
    others = {index: kept for index, kept in state.items() if index != KEY}
    plain = {index: plain_entry(entry) for index, entry in entries.items()}
    return {**state_dict, "state": {**others, **plain}}


def let_go(owners: Iterable[Owner]) -> None:
    """Prepare the optimizers of parameters that are no longer wrapped; their updates are done.

    At the next step or `state_dict()` each optimizer converts its moments to torch's layout."""
    owners = list(owners)
    for context in {owner.context for owner in owners}:
        if context.loss_scale is not None:
            context.loss_scale.take_back_skipped()  # the last step may have been skipped
    for optimizer in steppers_of(owners):
        held = held_state(optimizer)
        entries = [e for e in wrapped_parameters(optimizer) if e[2] in held]
        for owner, _, index in entries:
            held[index]["step"] = owner.member.step
        if isinstance(held, StateEntries):
            held.keep({index: owner.member.parameter for owner, _, index in entries})
        optimizer.register_state_dict_pre_hook(_before_export)


def _before_export(optimizer: Optimizer) -> None:
    make_plain(optimizer, but={index for _, _, index in wrapped_parameters(optimizer)})


def _check(
    optimizer: Optimizer,
    entries: dict[int, dict[str, Any]],
    indices: Collection[int],
    parameters: dict[int, Tensor],
) -> None:
    """Raise BadInput or MisusedModel for entries that cannot be converted, before any change."""
    names = {i: f"parameter {i}, {tuple(p.shape)}" for i, p in parameters.items()}
    for index in indices:
        if index not in parameters:
            raise MisusedModel(
                f"the loaded optimizer state names parameter {index!r}, and this optimizer has "
                f"{len(parameters)}: it belongs to another model"
            )
        check_entry(names[index], entries[index], parameters[index].shape)
    amsgrad = any(group.get("amsgrad") for group in optimizer.param_groups)
    if not isinstance(optimizer, Adam | AdamW) or amsgrad:
        kind = f"{type(optimizer).__name__}{' with amsgrad' if amsgrad else ''}"
        raise MisusedModel(
            f"this {kind} was given the state of an AdamW that FluxTrain stepped, moments of "
            f"{len(indices)} parameters, and cannot go on from them: use torch.optim.AdamW without "
            f"amsgrad, or begin without a state (del optimizer.state[{KEY!r}])"
        )
