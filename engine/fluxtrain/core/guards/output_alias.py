"""Outputs of a block that are its arguments, or share memory with them or with one another.

A block computes on aliases of its arguments, because its graph must not reach into the caller's. An
output that is an argument (or a view of one) is returned as that argument, with autograd watching,
so that a later write to one of the two is seen in the other, as in the plain model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fluxtrain.core.guards.arguments import Tree
from fluxtrain.core.guards.shared_memory import is_all_of, same_elements, storage_of

Geometry = tuple[torch.Size, tuple[int, ...], int]  # size, stride, elements from the start


@dataclass(frozen=True)
class OutputAlias:
    """Where an output of a block is taken from: one of its results or of the caller's arguments."""

    result: int | None
    argument: int | None = None
    view: Geometry | None = None  # None: all of it
    cut: bool = False  # without its gradient

    def take(self, results: Mapping[int, Tensor], arguments: Sequence[Tensor]) -> Tensor:
        """Return the output as the caller sees it."""
        if self.result is not None:
            source = results[self.result]
        else:
            assert self.argument is not None
            source = arguments[self.argument]
        if self.cut:
            source = source.detach()
        if self.view is None:
            return source
        size, stride, start = self.view
        return source.as_strided(size, stride, source.storage_offset() + start)


class CallOutputs:
    """The outputs of one call of a block, and which results leave the autograd function."""

    def __init__(self) -> None:
        self._tree: Tree | None = None
        self._by_chunk: list[list[OutputAlias]] = []
        self._aliases: list[OutputAlias] = []  # of the whole batch
        self._count = 0  # results of one chunk
        self.returned: list[int] = []  # which of them are returned

    def note_chunk(self, tree: Tree, aliases: list[OutputAlias], count: int) -> None:
        """Note what one chunk returned in the forward pass."""
        self._tree, self._count = tree, count
        self._by_chunk.append(aliases)

    def finish_forward(self) -> None:
        """Decide which results leave the autograd function, after all chunks have run."""
        self._aliases = merged_aliases(self._by_chunk)
        self._by_chunk = []
        self.returned = sorted({a.result for a in self._aliases if a.result is not None})

    def hand_out(self, flat: Sequence[Tensor], arguments: Sequence[Tensor]) -> Any:
        """Return the block's outputs and captured tensors as its caller sees them."""
        results = dict(zip(self.returned, flat, strict=True))
        assert self._tree is not None
        return self._tree.fill([alias.take(results, arguments) for alias in self._aliases])

    def gradients_of_results(self, gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
        """List gradients by result of the block: None where it did not leave the function."""
        found = dict(zip(self.returned, gradients, strict=True))
        return [found.get(i) for i in range(self._count)]


def find_aliases(
    outputs: Sequence[Tensor], given: Sequence[Tensor], *, whole: bool
) -> tuple[list[OutputAlias], list[Tensor]]:
    """Find where each output comes from, and which results a block must compute for them.

    whole: the outputs are those of the whole batch. For a chunk, an alias is recorded only when the
    output is all of an argument, and every output is a result too, because chunks may differ.
    """
    arguments = {id(_root(tensor)): i for i, tensor in enumerate(given)}
    memory = {storage_of(tensor): i for i, tensor in enumerate(given) if tensor.numel()}
    roots = [id(_root(output)) for output in outputs]
    aliases: list[OutputAlias] = []
    results: list[Tensor] = []
    for output, root in zip(outputs, roots, strict=True):
        argument = arguments.get(root)
        if argument is None and output.numel() and not output.requires_grad:
            argument = memory.get(storage_of(output))  # such as x.detach()
        alias = None if argument is None else _within(output, given[argument], argument)
        if not whole:
            only = alias if alias is not None and alias.view is None else None
            aliases.append(only or OutputAlias(len(results)))
            results.append(output)
        elif alias is not None:
            aliases.append(alias)
        elif roots.count(root) > 1 and _root(output).dtype == output.dtype:
            base = _root(output)
            at = next((i for i, r in enumerate(results) if r is base), len(results))
            if at == len(results):
                results.append(base)
            view = None if is_all_of(output, base) else _geometry(output, base)
            cut = base.requires_grad and not output.requires_grad
            aliases.append(OutputAlias(at, view=view, cut=cut))
        else:
            aliases.append(OutputAlias(len(results)))
            results.append(output)
    return aliases, results


def merged_aliases(by_chunk: Sequence[Sequence[OutputAlias]]) -> list[OutputAlias]:
    """Merge the aliases of all chunks: an output is an argument if it is so in each chunk."""
    if len(by_chunk) == 1:
        return list(by_chunk[0])
    return [
        every[0] if all(alias == every[0] for alias in every) else OutputAlias(position)
        for position, every in enumerate(zip(*by_chunk, strict=True))
    ]


def chunk_outputs(
    outputs: Sequence[Sequence[Tensor]],
    chunk_inputs: Sequence[Sequence[Tensor]],
    arguments: Sequence[Tensor],
    whole_of: Callable[[int], Tensor | None],
) -> list[Tensor]:
    """List the outputs of all chunks together, by `whole_of` their place; an output that is an
    argument in each chunk becomes the caller's argument."""
    whole: list[Tensor] = []
    for place, parts in enumerate(zip(*outputs, strict=True)):
        same = (
            argument
            for i, argument in enumerate(arguments)
            if all(same_elements(p, given[i]) for p, given in zip(parts, chunk_inputs, strict=True))
        )
        found = next(same, None)
        merged = whole_of(place) if found is None else found
        assert merged is not None, "every chunk has brought rows"
        whole.append(merged)
    return whole


def _within(output: Tensor, given: Tensor, argument: int) -> OutputAlias | None:
    """Describe an output in an argument's memory as a view of it; None where that is impossible."""
    if output.dtype != given.dtype or output.layout != torch.strided:
        return None
    view = None if is_all_of(output, given) else _geometry(output, given)
    cut = given.requires_grad and not output.requires_grad
    return OutputAlias(None, argument, view, cut)


def _geometry(tensor: Tensor, base: Tensor) -> Geometry:
    start = int(tensor.storage_offset()) - int(base.storage_offset())
    return tensor.size(), tensor.stride(), start


def _root(tensor: Tensor) -> Tensor:
    """Return the base that a tensor is a view of, for autograd; itself if it is no view."""
    base: Tensor | None = tensor._base
    return tensor if base is None else base
