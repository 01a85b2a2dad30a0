"""Detect tensors that leave or enter a block other than as outputs or arguments.

A block's weights are in a slot that later blocks use, so a view of a weight that outlives the
block's computation would show another block's weights. And a tensor that a block takes from
elsewhere would lose its gradient, because backward computes the gradients of the arguments and of
the block's own weights only.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from fluxtrain.core.memory.group import Group
from fluxtrain.core.memory.segment import Member
from fluxtrain.core.memory.states_on_disk import loaded
from fluxtrain.core.memory.unit import Unit
from fluxtrain.errors import MisusedModel

_MOMENT_S = 0.002


class BoundWeights:
    """A unit's weights while it computes: references to slots and scratch, and writes to them."""

    def __init__(self, unit: Unit) -> None:
        self._unit = unit
        self._before = [_state(member.parameter) for _, member in unit.members]
        moved = [
            member.parameter.untyped_storage()
            for group, member in unit.members
            if not group.is_on("device") or member.segment.packed is not None
        ]
        self._slots = list({storage.data_ptr(): storage for storage in moved}.values())
        self._references = self._count()

    def refuse_writes(self) -> None:
        """Raise MisusedModel when the computation wrote to a weight: a write to a slot is lost, and
        computing the block again would write a second time."""
        for (group, member), before in zip(self._unit.members, self._before, strict=True):
            if _state(member.parameter) == before:
                continue
            shortens = getattr(self._unit.module, "max_norm", None) is not None
            if shortens and _copy_to_host(group, member):
                continue
            for written in self._unit.groups:
                written.weights_changed(frozen=True)  # the slots no longer equal the host's weights
            raise MisusedModel(
                f"{self._unit.name} wrote to its weight {member.name} in its forward pass, which "
                "would be lost: compute with a new tensor there (weight.clamp(...), not "
                "weight.clamp_(...)), or write to it after optimizer.step() under torch.no_grad()"
            )

    def are_referred_to(self) -> bool:
        """Return whether the computation left references to a slot, such as a view of a weight
        stored on `ctx`. Looks twice: another thread may hold one for a moment."""
        if not self._has_more():
            return False
        time.sleep(_MOMENT_S)
        return self._has_more()

    def _has_more(self) -> bool:
        now = self._count()
        return any(count > before for count, before in zip(now, self._references, strict=True))

    def _count(self) -> list[int]:
        return [torch._C._storage_Use_Count(slot._cdata) for slot in self._slots]


def _copy_to_host(group: Group, member: Member) -> bool:
    """Copy rows that an embedding with `max_norm` shortened to the host; doing that again changes
    nothing. False where masters on the device would have to be corrected by row."""
    segment = member.segment
    if group.is_on("device"):
        return segment.lo is None and segment.master is None
    host = group.memory.views[member.index]
    with torch.no_grad():
        now = member.parameter.detach().to(host.device)
        changed = now != host
        host.copy_(now)
        states = member.states()
        if "lo" in states:
            states["lo"].copy_(loaded(states["lo"]).masked_fill(changed, 0))
        if "master" in states:
            master = loaded(states["master"])
            states["master"].copy_(torch.where(changed, now.to(master.dtype), master))
    return True


def _state(parameter: nn.Parameter) -> tuple[int, int]:
    return parameter._version, parameter.data_ptr()


def refuse_foreign_inputs(
    unit: Unit,
    anchor: Tensor,
    inputs: Sequence[Tensor],
    outputs: Sequence[Tensor],
    ends: Sequence[GradientEdge],
) -> None:
    """Raise MisusedModel when the recorded graph reaches weights of other modules, or activations
    that are no arguments. `anchor`: the leaf that all units' nodes lead to."""
    known = {id(end.node) for end in ends}
    edges = [get_gradient_edge(tensor) for tensor in inputs if tensor.requires_grad]  # own nodes
    known |= {id(edge.node) for edge in edges}
    nodes: list[Any] = [output.grad_fn for output in outputs if output.grad_fn is not None]
    seen = {id(node): node for node in nodes}  # a node's id is its own as long as it is held
    while nodes:
        node = nodes.pop()
        if id(node) in known:
            continue
        leaf = getattr(node, "variable", None)
        if leaf is anchor or isinstance(leaf, nn.Parameter):
            raise MisusedModel(
                f"{unit.name} computes with a tensor that is neither an argument nor a weight of "
                "its own but asks for gradients, which would be lost: pass activations as "
                "arguments, and register weights in the block"
            )
        for after, _ in node.next_functions:
            if after is not None and id(after) not in seen:
                seen[id(after)] = after
                nodes.append(after)
