"""What passes a block's border beside its arguments and its outputs.

A block's weights lie in a slot that other blocks use after it, so a view of one that outlives the
block's computation would show another block's weights. And a tensor that a block takes from
elsewhere would lose its gradient, because only the gradients of arguments and of the block's own
weights are asked for.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from fluxtrain.errors import MisusedModel
from fluxtrain.memory.group import Group
from fluxtrain.memory.segment import Member
from fluxtrain.memory.unit import Unit

_MOMENT_S = 0.002


class BoundWeights:
    """A unit's weights while it computes: the slots that they lie in, who refers to those, and
    whether they are written to."""

    def __init__(self, unit: Unit) -> None:
        self._unit = unit
        self._before = [_state(member.parameter) for _, member in unit.members]
        homes = [g for g in unit.groups if g.placement.weights != "device"]
        self._slots = [unit.members_of(g)[0].parameter.untyped_storage() for g in homes]
        self._references = self._count()

    def refuse_writes(self) -> None:
        """Raise MisusedModel when the computation wrote to a weight: in a slot that would be lost,
        and computing the block again would write a second time."""
        for (group, member), before in zip(self._unit.members, self._before, strict=True):
            if _state(member.parameter) == before:
                continue
            shortens = getattr(self._unit.module, "max_norm", None) is not None
            if shortens and _take_home(group, member):
                continue
            for written in self._unit.groups:
                written.version += 1  # what the slots hold is not what is at home
            raise MisusedModel(
                f"{self._unit.name} wrote to its weight {member.name} in its forward pass, which "
                "would be lost: compute with a new tensor there (weight.clamp(...), not "
                "weight.clamp_(...)), or write to it after optimizer.step() under torch.no_grad()"
            )

    def are_referred_to(self) -> bool:
        """Did the computation leave references to a slot behind, as a function does that stores a
        view of a weight on `ctx`? Looks twice: another thread may hold one for a moment."""
        if not self._has_more():
            return False
        time.sleep(_MOMENT_S)
        return self._has_more()

    def _has_more(self) -> bool:
        now = self._count()
        return any(count > before for count, before in zip(now, self._references, strict=True))

    def _count(self) -> list[int]:
        return [torch._C._storage_Use_Count(slot._cdata) for slot in self._slots]


def _take_home(group: Group, member: Member) -> bool:
    """An embedding shortened rows that it looked up, and doing that again changes nothing: they
    are at home now too. False where masters on the device would have to know which rows."""
    segment = member.segment
    if group.placement.weights == "device":
        return segment.lo is None and segment.master is None
    home = group.home_views[member.index]
    with torch.no_grad():
        now = member.parameter.detach().to(home.device)
        changed = now != home
        home.copy_(now)
        if segment.lo is not None:
            member.slice(segment.lo).masked_fill_(changed, 0)
        if segment.master is not None:
            master = member.slice(segment.master)
            master.copy_(torch.where(changed, now.to(master.dtype), master))
    return True


def _state(parameter: nn.Parameter) -> tuple[int, int]:
    return parameter._version, parameter.data_ptr()


def copied_out(unit: Unit, outputs: Sequence[Tensor]) -> list[Tensor]:
    """The outputs; a copy of each that lies in the memory of a weight."""
    weights = {member.parameter.untyped_storage().data_ptr() for _, member in unit.members}
    with torch.enable_grad():  # a copy asks for gradients where the output does
        return [
            output.clone()
            if output.layout == torch.strided and output.untyped_storage().data_ptr() in weights
            else output
            for output in outputs
        ]


def refuse_foreign_inputs(
    unit: Unit,
    anchor: Tensor,
    inputs: Sequence[Tensor],
    outputs: Sequence[Tensor],
    ends: Sequence[GradientEdge],
) -> None:
    """Raise MisusedModel where the recorded graph leads to weights of other modules or to
    activations that came in beside the arguments. `anchor`: the leaf that all units' nodes lead to.
    """
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
