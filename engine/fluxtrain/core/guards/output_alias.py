"""Outputs of a block that are its arguments.

A block computes on aliases of its arguments, because its graph must not reach into the caller's. An
output that is an argument is returned as that argument, with autograd watching, so that a later
write to one of the two is seen in the other, as in the plain model. An output that shares memory in
another way, with an argument, a weight or another output, is copied: a write to it is its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fluxtrain.core.guards.arguments import Tree
from fluxtrain.core.guards.shared_memory import overlap, same_elements, storage_of
from fluxtrain.core.memory.unit import Unit


class CallOutputs:
    """The outputs of one call of a block, and which of them its autograd function returns."""

    def __init__(self) -> None:
        self._tree: Tree | None = None
        self._arguments: list[int | None] = []  # by output: the argument that it is
        self.returned: list[int] = []  # outputs that are computed

    def note_chunk(self, tree: Tree, outputs: Sequence[Tensor], given: Sequence[Tensor]) -> None:
        """Note what the forward pass of one chunk returned for the arguments `given`."""
        found = [argument_at(output, given) for output in outputs]
        if self._tree is None:
            self._tree, self._arguments = tree, found
        else:  # it is an argument if it is one in each chunk
            pairs = zip(self._arguments, found, strict=True)
            self._arguments = [one if one == other else None for one, other in pairs]

    def finish_forward(self) -> None:
        """Decide which outputs the autograd function returns, after all chunks have run."""
        self.returned = [i for i, argument in enumerate(self._arguments) if argument is None]

    def hand_out(self, flat: Sequence[Tensor], arguments: Sequence[Tensor]) -> Any:
        """Return the block's outputs and captured tensors as its caller sees them."""
        assert self._tree is not None
        computed = iter(flat)
        return self._tree.fill(
            [next(computed) if i is None else arguments[i] for i in self._arguments]
        )

    def gradients_of_outputs(self, gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
        """List the gradients by output: None for one that the function did not return."""
        found = dict(zip(self.returned, gradients, strict=True))
        return [found.get(i) for i in range(len(self._arguments))]


def argument_at(output: Tensor, given: Sequence[Tensor]) -> int | None:
    """Return the position of the argument that an output is; None if none is. An argument that
    requires a gradient must be the same object: a view of it may have another backward."""
    for i, argument in enumerate(given):
        alike = not output.requires_grad and not argument.requires_grad
        if output is argument or (alike and same_elements(output, argument)):
            return i
    return None


def own_outputs(unit: Unit, outputs: Sequence[Tensor], given: Sequence[Tensor]) -> list[Tensor]:
    """Return the outputs, with a copy in place of each that is in the memory of a weight, of an
    argument (`given`) that it is not, or of an output before it."""
    taken = {member.parameter.untyped_storage().data_ptr() for _, member in unit.members}
    taken |= {storage_of(tensor) for tensor in given if tensor.numel()}
    own: list[Tensor] = []
    for output in outputs:
        shares = output.numel() and (
            storage_of(output) in taken or any(overlap(output, earlier) for earlier in own)
        )
        if shares and argument_at(output, given) is None:
            with torch.enable_grad():  # a copy asks for gradients where the output does
                output = output.clone()  # noqa: PLW2901
        own.append(output)
    return own
