"""The arguments of one call of a block: what it writes to them, what the backward pass keeps.

The backward pass computes a block again on its arguments, so it needs their values from before a
write in place. A block may write to an argument that asks for no gradient: once a first call has
shown the write, the argument is copied before the block runs. Published blocks need no more: a
decoder layer of OneFormer clears rows of its mask, the prompter of TVP blanks parts of its frames.
Other writes are refused. One that torch does not count (through `.data` or `.numpy()`) is noticed
by its results in the first backward passes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from fluxtrain.core.block.recompute import aliased_leaf
from fluxtrain.core.device.device import Device
from fluxtrain.core.guards.arguments import Tree, argument_name, opaque, slice_rows
from fluxtrain.core.guards.shared_memory import (
    overlap,
    same_layout_copy,
    version_counter,
    version_of,
)
from fluxtrain.core.memory.activation_offload import ActivationOffload, OffloadedActivation
from fluxtrain.core.memory.unit import Unit
from fluxtrain.core.runtime.arrivals import wait_for_all
from fluxtrain.core.runtime.counters import CardCounts, HeldInputs
from fluxtrain.errors import MisusedModel

WRITES_TO_A_LEAF = "a view of a leaf Variable that requires grad is being used in an in-place"
_DIFFERENTIABLE = "which asks for gradients"
_KNOWN_KINDS = 256  # a bound: a dict with new keys in each call is a new kind each time


class CallArguments:
    """The tensors among the arguments of one call, from before the forward to the backward."""

    def __init__(
        self,
        device: Device,
        counts: CardCounts,
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
        self.explores = known is None  # the first call of this kind copies all arguments
        if known is None or known:  # they are copied before the first chunk asks for its rows
            wait_for_all(device, tensors)
        self._copies: Mapping[int, Tensor] = {  # before the block wrote to them
            i: copy
            for i in (range(len(tensors)) if known is None else known)
            if (copy := same_layout_copy(tensors[i])) is not None
        }
        self._versions = [version_of(tensor) for tensor in tensors]
        self._held = [
            (leaf, tensor, version_of(tensor)) for leaf, held in opaque(tree) for tensor in held
        ]
        # inputs until the backward pass: those that wait on the host, those on the device
        self._offloaded: dict[int, OffloadedActivation] = {}
        self._kept: dict[int, Tensor] = {}
        self._held_inputs = HeldInputs(counts)
        self._leaves: set[int] = set()
        self._turn: int | None = None  # in the order of the forward pass
        # by argument: a counter of writes, its count after the forward
        self._watched: list[tuple[int, Tensor, int]] = []

    def offload(self, offload: ActivationOffload, tensors: Sequence[Tensor]) -> None:
        """Offload the inputs that require gradients to the host until the backward pass."""
        self._turn = offload.next_turn()
        self._offloaded = offload.offload(tensors, self.needs, self._turn)

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

    def undo(self, inputs: Sequence[Tensor], rows: slice) -> None:
        """Restore the inputs of a chunk to what they were before the block ran on them. `rows`: the
        chunk's rows of the arguments that are cut."""
        for i, copy in self._copies.items():
            if not inputs[i].requires_grad and version_of(inputs[i]) != self._versions[i]:
                inputs[i].copy_(copy[rows] if self.cut[i] else copy)

    def refuse_change(self, arguments: Any, inputs: Sequence[Tensor]) -> None:
        """Raise MisusedModel when the block changed a list or dict among the arguments of a chunk,
        or made an argument that asks for no gradients depend on one that does."""
        for i, (tensor, needed) in enumerate(zip(inputs, self.needs, strict=True)):
            if tensor.requires_grad and not needed:
                raise self._refusal([i], _DIFFERENTIABLE)
        if self.tree.nests() and not self.tree.is_in(arguments, inputs):
            raise MisusedModel(
                f"{self._unit.name} changed a list or dict that it was given (append, pop, or "
                "another value for a key), which its caller would not see: return what is new "
                "instead"
            )

    def refuse_write_to_leaf(self, error: RuntimeError) -> NoReturn:
        """Raise MisusedModel for torch's `error` about a write to an argument that asks for
        gradients, or `error` itself when no argument does."""
        asking = [i for i, needed in enumerate(self.needs) if needed]
        if not asking:
            raise error
        raise self._refusal(asking, _DIFFERENTIABLE) from error

    def finish_forward(self, tensors: Sequence[Tensor], offload: ActivationOffload) -> None:
        """Keep the inputs that the backward pass recomputes from and that are not on the host, as
        they were before the block wrote to them. Raises MisusedModel for a write that cannot be
        followed."""
        copies = self._copies_of_written(tensors)
        if self.explores:
            kinds = self._unit.written_arguments
            if len(kinds) >= _KNOWN_KINDS:
                kinds.clear()
            kinds[self._kind] = frozenset(copies)
        for i, tensor in enumerate(tensors):
            if i not in copies:
                self._watched.append((i, version_counter(tensor), version_of(tensor)))
            if i not in self._offloaded:
                self._kept[i] = copies.get(i, tensor).detach()
        self._leaves = {i for i, tensor in enumerate(tensors) if tensor.is_leaf}  # or need nothing
        needed = sum(tensor.nbytes for i, tensor in self._kept.items() if self.needs[i])
        if self._turn is None:
            self._turn = offload.next_turn()
        if self._unit.recomputes:
            self._held_inputs.add(needed, self.evictable_bytes)
            offload.keep(self)
        else:  # their graph holds them, too
            self._held_inputs.add(needed, 0)
        # the memory of the others is not held until the backward pass
        self._copies, self._held = copies, []

    def refuse_changed(self) -> None:
        """Raise MisusedModel when an argument was written to after the forward pass."""
        for i, counter, version in self._watched:
            if version_of(counter) != version:
                name = argument_name(self._unit.original, self.tree, i)
                raise MisusedModel(
                    f"the tensor that {self._unit.name} was given as {name} was changed in place "
                    "after its forward pass, and the backward pass computes with it again: "
                    f"{_new_tensor(name)} there, or hand the block a copy (.clone())"
                )

    def fetch(self, offload: ActivationOffload) -> list[Tensor]:
        """Return all inputs on the device, both kept and offloaded ones."""
        return [
            offload.fetch(self._offloaded[i]) if i in self._offloaded else self._kept[i]
            for i in range(len(self.needs))
        ]

    @property
    def evictable_bytes(self) -> int:
        """Return the bytes that `evict` would free."""
        return sum(self._kept[i].nbytes for i in self._evictable())

    def evict(self, offload: ActivationOffload) -> None:
        """Offload the inputs that were to stay on the device until the backward pass."""
        which, size_bytes = self._evictable(), self.evictable_bytes
        self._held_inputs.add(-size_bytes, -size_bytes, size_bytes)
        left = [self._kept.pop(i) for i in which]
        moved = offload.offload(left, [True] * len(left), self._turn)
        for place, one in moved.items():
            self._offloaded[which[place]] = one
            offload.evicted(self._unit.group, one.download, one.host.nbytes)

    def release(self) -> None:
        """Drop the inputs on the device: their backward pass has run."""
        self._kept.clear()
        self._held_inputs.leave()

    def _evictable(self) -> list[int]:
        """Return which inputs on the device nobody else is known to hold."""
        kept = self._kept.items()
        return [i for i, tensor in kept if i not in self._leaves and tensor.is_contiguous()]

    def _copies_of_written(self, tensors: Sequence[Tensor]) -> dict[int, Tensor]:
        for leaf, tensor, version in self._held:
            if version_of(tensor) != version:
                raise MisusedModel(
                    f"{self._unit.name} wrote in place to a tensor inside of its argument of type "
                    f"{type(leaf).__name__}, and would write a second time when it is computed "
                    "again: pass such tensors as arguments of their own, or in tuples, lists or "
                    "dicts"
                )
        written = [i for i, t in enumerate(tensors) if version_of(t) != self._versions[i]]
        for i in written:
            if why := self._why_not(i, tensors):
                raise self._refusal([i], why)
        return {i: self._copies[i] for i in written}

    def _why_not(self, i: int, tensors: Sequence[Tensor]) -> str:
        """Say why a write to argument `i` cannot be tracked; empty where it can."""
        if tensors[i].requires_grad:
            return _DIFFERENTIABLE
        if i not in self._copies:
            return (
                "which it did not do in its first call, so the value before was not kept for the "
                "backward pass, which computes the block again"
            )
        if any(self.cut) and not self.cut[i]:
            return "which all rows of the batch share, and would do so once for each chunk of rows"
        if any(j != i and overlap(tensors[i], other) for j, other in enumerate(tensors)):
            return "and another argument shares memory with it"
        return ""

    def _refusal(self, which: Sequence[int], why: str) -> MisusedModel:
        names = [argument_name(self._unit.original, self.tree, i) for i in which]
        return MisusedModel(
            f"{self._unit.name} wrote in place to its argument {' or '.join(names)}, {why}: "
            f"{_new_tensor(names[0])} in the block, or hand it a copy (.clone())"
        )


def _new_tensor(name: str) -> str:
    """Say how not to write in place to an argument of this name."""
    x = name if name.isidentifier() else "x"
    return f"compute a new tensor ({x} = {x} + 1, not {x} += 1)"
