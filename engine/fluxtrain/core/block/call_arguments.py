"""The arguments of one call of a block, and what the backward pass keeps of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from fluxtrain.core.block.recompute import aliased_leaf
from fluxtrain.core.device.device import Device
from fluxtrain.core.guards.argument_writes import ArgumentWrites, new_tensor
from fluxtrain.core.guards.arguments import Tree, argument_name, slice_rows
from fluxtrain.core.guards.shared_memory import version_counter, version_of
from fluxtrain.core.memory.activation_offload import ActivationOffload, OffloadedActivation
from fluxtrain.core.memory.unit import Unit
from fluxtrain.core.runtime.arrivals import wait_for_all
from fluxtrain.errors import MisusedModel

_KNOWN_KINDS = 256  # a bound: a dict with new keys in each call is a new kind each time


class CallArguments:
    """The tensors among the arguments of one call, from forward to backward."""

    def __init__(
        self,
        device: Device,
        unit: Unit,
        tree: Tree,
        tensors: Sequence[Tensor],
        cut: Sequence[bool],
    ) -> None:
        self.tree = tree
        self.needs = tuple(t.requires_grad for t in tensors)  # which arguments ask for a gradient
        self.cut = cut  # which arguments carry the batch's rows
        self._unit = unit
        self._kind = (unit.module.training, tree.structure())
        known = unit.written_arguments.get(self._kind)
        self.explores = known is None  # the first call of this kind
        if known is None or known:  # they are copied before the first chunk asks for its rows
            wait_for_all(device, tensors)
        self.writes = ArgumentWrites(unit.name, unit.original, tree, tensors, known)
        self._copies: Mapping[int, Tensor] = {}  # of arguments before the block wrote to them
        self._offloaded: dict[int, OffloadedActivation] = {}  # inputs that wait on the host
        self._watched: list[
            tuple[int, Tensor, int]
        ] = []  # by argument: a counter of writes, its count after the forward
        self.kept_bytes = 0  # on the device

    def offload(self, offload: ActivationOffload, tensors: Sequence[Tensor]) -> None:
        """Let the inputs that ask for gradients wait on the host for the backward pass."""
        self._offloaded = offload.offload(tensors, self.needs)

    def inputs(
        self, tensors: Sequence[Tensor], span: tuple[int, int], *, again: bool
    ) -> list[Tensor]:
        """Return the inputs of one chunk, which ask for gradients where the caller's tensors do.
        again: this is a recomputation, in which the block writes to copies."""
        parts = slice_rows(tensors, self.cut, *span)
        if again and self._copies:
            parts = [part.clone() if i in self._copies else part for i, part in enumerate(parts)]
        with torch.enable_grad():
            return [
                aliased_leaf(part) if needed else part.detach()
                for part, needed in zip(parts, self.needs, strict=True)
            ]

    def finish_forward(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """List the inputs that the backward pass recomputes from and that are not on the host, as
        they were before the block wrote to them."""
        copies = self._copies = self.writes.finish(tensors, self.cut)
        if self.explores:
            kinds = self._unit.written_arguments
            if len(kinds) >= _KNOWN_KINDS:
                kinds.clear()
            kinds[self._kind] = frozenset(copies)
        kept: list[Tensor] = []
        for i, tensor in enumerate(tensors):
            if i not in copies:
                self._watched.append((i, version_counter(tensor), version_of(tensor)))
            if i not in self._offloaded:
                kept.append(copies.get(i, tensor))
                if self.needs[i]:
                    self.kept_bytes += tensor.nbytes
        return kept

    def refuse_changed(self) -> None:
        """Raise MisusedModel when an argument was written to after the forward pass."""
        for i, counter, version in self._watched:
            if version_of(counter) != version:
                name = argument_name(self._unit.original, self.tree, i)
                raise MisusedModel(
                    f"the tensor that {self._unit.name} was given as {name} was changed in place "
                    "after its forward pass, and the backward pass computes with it again: "
                    f"{new_tensor(name)} there, or hand the block a copy (.clone())"
                )

    def fetch(self, offload: ActivationOffload, kept: Sequence[Tensor]) -> list[Tensor]:
        """Return all inputs on the device: those that were kept, and those that were offloaded."""
        stayed, offloaded = iter(kept), self._offloaded
        return [
            offload.fetch(offloaded[i]) if i in offloaded else next(stayed)
            for i in range(len(self.needs))
        ]
