"""Writes of a block to its arguments in place: followed for masks, refused for activations.

The backward pass computes a block again on its arguments, so it needs their values from before a
write. A block may write to an argument that asks for no gradient: once a first call has shown the
write, the argument is copied before the block runs. Published blocks need no more: a decoder layer
of OneFormer clears rows of its mask, the prompter of TVP blanks parts of its frames. Other writes
are refused. One that torch does not count (through `.data` or `.numpy()`) is noticed by its results
in the first backward passes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

from torch import Tensor

from fluxtrain.core.guards.arguments import Tree, argument_name, opaque
from fluxtrain.core.guards.shared_memory import overlap, same_layout_copy, version_of
from fluxtrain.errors import MisusedModel

WRITES_TO_A_LEAF = "a view of a leaf Variable that requires grad is being used in an in-place"


class ArgumentWrites:
    """Watches the arguments of one call of a block, from before it runs.

    written: positions of the arguments that the block is known to write to; None in the first call
    of a kind, which copies all of them to find out.
    """

    def __init__(
        self,
        name: str,
        function: Callable[..., Any],
        tree: Tree,
        tensors: Sequence[Tensor],
        written: frozenset[int] | None,
    ) -> None:
        self._name, self._function, self._tree = name, function, tree
        self._copies = {
            i: copy
            for i in (range(len(tensors)) if written is None else written)
            if (copy := same_layout_copy(tensors[i])) is not None
        }
        self._versions = [version_of(tensor) for tensor in tensors]
        self._held = [
            (leaf, tensor, version_of(tensor)) for leaf, held in opaque(tree) for tensor in held
        ]

    def finish(self, tensors: Sequence[Tensor], cut: Sequence[bool]) -> Mapping[int, Tensor]:
        """Return copies of the arguments that the block wrote to, from before it ran, by position.

        cut: the arguments that were cut into chunks of rows. Raises MisusedModel for a write that
        cannot be followed.
        """
        for leaf, tensor, version in self._held:
            if version_of(tensor) != version:
                raise MisusedModel(
                    f"{self._name} wrote in place to a tensor inside of its argument of type "
                    f"{type(leaf).__name__}, and would write a second time when it is computed "
                    "again: pass such tensors as arguments of their own, or in tuples, lists or "
                    "dicts"
                )
        written = [i for i, t in enumerate(tensors) if version_of(t) != self._versions[i]]
        for i in written:
            why = self._why_not(i, tensors, cut)
            if why:
                raise self._refusal([i], why)
        copies = {i: self._copies[i] for i in written}
        self._copies, self._held = {}, []  # their memory is not held until the backward pass
        return copies

    def undo(self, inputs: Sequence[Tensor], rows: slice, cut: Sequence[bool]) -> None:
        """Restore the inputs of a chunk to what they were before the block ran on them. `rows`: the
        chunk's rows of the arguments that are cut."""
        for i, copy in self._copies.items():
            if not inputs[i].requires_grad and version_of(inputs[i]) != self._versions[i]:
                inputs[i].copy_(copy[rows] if cut[i] else copy)

    def refuse_change(
        self, arguments: Any, inputs: Sequence[Tensor], needs: Sequence[bool]
    ) -> None:
        """Raise MisusedModel when the block changed a list or dict among the arguments of a chunk,
        or made an argument that asks for no gradients (`needs`) depend on one that does."""
        for i, (tensor, needed) in enumerate(zip(inputs, needs, strict=True)):
            if tensor.requires_grad and not needed:
                raise self._refusal([i], _DIFFERENTIABLE)
        if self._tree.nests() and not self._tree.is_in(arguments, inputs):
            raise MisusedModel(
                f"{self._name} changed a list or dict that it was given (append, pop, or another "
                "value for a key), which its caller would not see: return what is new instead"
            )

    def refuse_write_to_leaf(self, needs: Sequence[bool], error: RuntimeError) -> NoReturn:
        """Raise MisusedModel for torch's `error` about a write to an argument that asks for
        gradients, or `error` itself when no argument does."""
        if not any(needs):
            raise error
        asking = [i for i, needed in enumerate(needs) if needed]
        raise self._refusal(asking, _DIFFERENTIABLE) from error

    def _why_not(self, i: int, tensors: Sequence[Tensor], cut: Sequence[bool]) -> str:
        """Say why a write to argument `i` cannot be followed; empty where it can."""
        if tensors[i].requires_grad:
            return _DIFFERENTIABLE
        if i not in self._copies:
            return (
                "which it did not do in its first call, so the value before was not kept for the "
                "backward pass, which computes the block again"
            )
        if any(cut) and not cut[i]:
            return "which all rows of the batch share, and would do so once for each chunk of rows"
        if any(j != i and overlap(tensors[i], other) for j, other in enumerate(tensors)):
            return "and another argument shares memory with it"
        return ""

    def _refusal(self, which: Sequence[int], why: str) -> MisusedModel:
        names = [argument_name(self._function, self._tree, i) for i in which]
        return MisusedModel(
            f"{self._name} wrote in place to its argument {' or '.join(names)}, {why}: "
            f"{new_tensor(names[0])} in the block, or hand it a copy (.clone())"
        )


_DIFFERENTIABLE = "which asks for gradients"


def new_tensor(name: str) -> str:
    """Say how not to write in place to an argument of this name."""
    x = name if name.isidentifier() else "x"
    return f"compute a new tensor ({x} = {x} + 1, not {x} += 1)"
