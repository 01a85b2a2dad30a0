"""Writes of a block to its arguments in place: followed for masks, refused for activations.

The backward pass computes a block again on its arguments, so it needs their values from before a
write. A block may write to an argument that asks for no gradient: once a first call has shown the
write, the argument is copied before the block runs. Published blocks need no more: a decoder layer
of OneFormer clears rows of its mask, the prompter of TVP blanks parts of its frames. A write to an
activation that asks for gradients is refused. So is one that torch does not count (through `.data`
or `.numpy()`), which only the first call looks for.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

from torch import Tensor

from fluxtrain.core.guards.arguments import Tree, argument_name, opaque
from fluxtrain.core.guards.shared_memory import overlap, same_bits, same_layout_copy, version_of
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
        explores = self._explores = written is None
        self._copies = {
            i: copy
            for i in (range(len(tensors)) if written is None else written)
            if (copy := same_layout_copy(tensors[i])) is not None
        }
        self._versions = [version_of(tensor) for tensor in tensors]
        self._held = [
            (leaf, tensor, version_of(tensor), same_layout_copy(tensor) if explores else None)
            for leaf, tensors in opaque(tree)
            for tensor in tensors
        ]

    def finish(self, tensors: Sequence[Tensor], cut: Sequence[bool]) -> Mapping[int, Tensor]:
        """Return copies of the arguments that the block wrote to, from before it ran, by position.

        cut: the arguments that were cut into chunks of rows. Raises MisusedModel for a write that
        cannot be followed.
        """
        now = [version_of(tensor) for tensor in tensors]
        counted = [i for i, version in enumerate(now) if version != self._versions[i]]
        if self._explores:
            self._refuse_uncounted(tensors, counted)
        self._refuse_held()
        for i in counted:
            self._refuse_lost(i, tensors, cut)
        copies = {i: self._copies[i] for i in counted}
        self._copies, self._held = {}, []  # their memory is not held until the backward pass
        return copies

    def undo(self, inputs: Sequence[Tensor], rows: slice, cut: Sequence[bool]) -> None:
        """Restore the inputs of a chunk to what they were before the block ran on them. `rows`: the
        chunk's rows of the arguments that are cut."""
        for i, copy in self._copies.items():
            before = copy[rows] if cut[i] else copy
            if not inputs[i].requires_grad and not same_bits(inputs[i], before):
                inputs[i].copy_(before)

    def refuse_change(
        self, arguments: Any, inputs: Sequence[Tensor], needs: Sequence[bool]
    ) -> None:
        """Raise MisusedModel when the block changed a list or dict among the arguments of a chunk,
        or made an argument that asks for no gradients (`needs`) depend on one that does."""
        for i, (tensor, needed) in enumerate(zip(inputs, needs, strict=True)):
            if tensor.requires_grad and not needed:
                self._refuse_differentiable(i)
        if self._tree.nests() and not self._tree.is_in(arguments, inputs):
            raise MisusedModel(
                f"{self._name} changed a list or dict that it was given (append, pop, or another "
                "value for a key), which its caller would not see: return what is new instead"
            )

    def refuse_write_to_leaf(self, needs: Sequence[bool], error: RuntimeError) -> NoReturn:
        """Raise MisusedModel for torch's `error` about a write to an argument that asks for
        gradients, or `error` itself when no argument does."""
        names = [self._argument(i) for i, needed in enumerate(needs) if needed]
        if not names:
            raise error
        raise _differentiable(self._name, names) from error

    def _refuse_differentiable(self, i: int) -> NoReturn:
        raise _differentiable(self._name, [self._argument(i)])

    def _refuse_uncounted(self, tensors: Sequence[Tensor], counted: Sequence[int]) -> None:
        """Raise when a copy shows a write that torch did not count. Waits for the device."""
        for i, copy in self._copies.items():
            if i not in counted and not same_bits(tensors[i], copy):
                name = self._argument(i)
                raise MisusedModel(
                    f"{self._name} wrote to its argument {name} in place, in a way that torch does "
                    f"not count (.data, .numpy()): {new_tensor(name)} in the block, or hand it a "
                    "copy (.clone())"
                )

    def _refuse_held(self) -> None:
        for leaf, tensor, version, copy in self._held:
            changed = copy is not None and not same_bits(tensor, copy)
            if changed or version_of(tensor) != version:
                raise MisusedModel(
                    f"{self._name} wrote in place to a tensor inside of its argument of type "
                    f"{type(leaf).__name__}, and would write a second time when it is computed "
                    "again: pass such tensors as arguments of their own, or in tuples, lists or "
                    "dicts"
                )

    def _refuse_lost(self, i: int, tensors: Sequence[Tensor], cut: Sequence[bool]) -> None:
        """Raise when the backward pass could not use the value that argument `i` had before."""
        name = self._argument(i)
        if tensors[i].requires_grad:
            self._refuse_differentiable(i)
        if i not in self._copies:
            raise MisusedModel(
                f"{self._name} wrote in place to its argument {name}, which it did not do in its "
                "first call, so the value before was not kept for the backward pass, which "
                f"computes the block again: {new_tensor(name)} in the block, or hand it a copy "
                "(.clone())"
            )
        if any(cut) and not cut[i]:
            raise MisusedModel(
                f"{self._name} wrote in place to its argument {name}, which all rows of the batch "
                "share, and would do so once for each chunk of rows: compute a new tensor instead"
            )
        if any(j != i and overlap(tensors[i], other) for j, other in enumerate(tensors)):
            raise MisusedModel(
                f"{self._name} wrote to its argument {name} in place, and another argument shares "
                "memory with it: hand the block a copy of one of the two (.clone())"
            )

    def _argument(self, i: int) -> str:
        return argument_name(self._function, self._tree, i)


class Untouched:
    """Tells whether a block has left its arguments as they were: by torch's counts of writes,
    without a copy. Tensors of inference mode have none."""

    def __init__(self, tree: Tree, tensors: Sequence[Tensor]) -> None:
        self._tree, self._given = tree, tensors
        self._watched = [*tensors, *(tensor for _, held in opaque(tree) for tensor in held)]
        self._versions = [version_of(tensor) for tensor in self._watched]

    @property
    def is_counted(self) -> bool:
        """True when torch counts the writes to all of them."""
        return not any(tensor.is_inference() for tensor in self._watched)

    def holds(self, arguments: Any) -> bool:
        """True when no counted write and no change to a list or dict among them was made."""
        if [version_of(tensor) for tensor in self._watched] != self._versions:
            return False
        return not self._tree.nests() or self._tree.is_in(arguments, self._given)


def _differentiable(block: str, names: Sequence[str]) -> MisusedModel:
    return MisusedModel(
        f"{block} wrote in place to its argument {' or '.join(names)}, which asks for gradients: "
        f"{new_tensor(names[0])} in the block, or hand it a copy (.clone())"
    )


def new_tensor(name: str) -> str:
    """Say how not to write in place to an argument of this name."""
    x = name if name.isidentifier() else "x"
    return f"compute a new tensor ({x} = {x} + 1, not {x} += 1)"
