"""What a block writes to its arguments in place, and which of its outputs are its arguments.

A block computes on stand-ins of its arguments, because its graph must not reach into the caller's.
What it writes to a stand-in is written to the caller's own tensor after it has run, and an output
that is an argument (or a view of one) is given back as that argument, with autograd watching: so a
later write to one of the two is seen in the other, as in the plain model.

Where writing is expected the stand-in is a copy, because what was there before is computed with
again. Which arguments a block writes to is found when it is first called in a way: by torch's count
of writes, and by what is in the copies, because writes through `.data` or `.numpy()` do not count.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fluxtrain.errors import MisusedModel
from fluxtrain.stream.arguments import Moved, Tree, argument_name, opaque
from fluxtrain.stream.recompute import without_memory

if TYPE_CHECKING:
    from fluxtrain.stream.block import Unit

Geometry = tuple[torch.Size, tuple[int, ...], int]  # size, stride, elements from the start
KNOWN_STRUCTURES = 32  # of arguments, by block; a dict with other keys each time has no end of them
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes of an element


class Habits:
    """Which arguments a block writes to in place, by mode and by the arguments that it is given.

    The structures that it was called with last are known; another is looked at anew.
    """

    def __init__(self) -> None:
        self._known: list[tuple[bool, Tree, frozenset[int]]] = []  # the last used at the end

    def of(self, training: bool, tree: Tree) -> frozenset[int] | None:
        """Positions among the tensors; None when it is not known to be called like this."""
        for place in reversed(range(len(self._known))):
            mode, like, written = self._known[place]
            if mode == training and like.is_like(tree):
                self._known.append(self._known.pop(place))
                return written
        return None

    def learn(self, training: bool, tree: Tree, written: frozenset[int]) -> bool:
        """Keep what was found; instead of what was known, if anything was. Was another structure
        forgotten for it?"""
        self._known = [k for k in self._known if k[0] != training or not k[1].is_like(tree)]
        skeleton = replace(tree, leaves=(None,) * len(tree.leaves))
        self._known.append((training, skeleton, written))
        forgets = len(self._known) > KNOWN_STRUCTURES
        del self._known[:-KNOWN_STRUCTURES]
        return forgets


class Given:
    """The arguments of one run of a block: `inputs` themselves, or copies of those at `copied`.

    explores: what objects among the arguments hold is compared with copies too.
    """

    def __init__(
        self, tree: Tree, inputs: Sequence[Tensor], copied: frozenset[int], *, explores: bool
    ) -> None:
        self._tree = tree
        self._copied = frozenset(i for i in copied if _can_be_written(inputs[i]))
        with torch.enable_grad():
            self.tensors = [
                same_layout_copy(given) if i in self._copied else given
                for i, given in enumerate(inputs)
            ]
        self.arguments = tree.fill(self.tensors)
        self._versions = [version_of(tensor) for tensor in self.tensors]
        self._originals = {i: (inputs[i], version_of(inputs[i])) for i in self._copied}
        self._held = [
            (leaf, tensor, version_of(tensor), _copy_of_held(tensor) if explores else None)
            for leaf, tensors in opaque(tree)
            for tensor in tensors
        ]

    def counted(self) -> frozenset[int]:
        """Positions of the tensors that were written to since, as far as torch counts that."""
        now = [version_of(tensor) for tensor in self.tensors]
        return frozenset(i for i, v in enumerate(now) if v != self._versions[i])

    def uncounted(self) -> frozenset[int]:
        """Positions of the copies that were written to past torch's count: through `.data`,
        `.numpy()` or a kernel of one's own. Waits for the device.

        Where the original was written to, as a buffer that is an argument too, the copy is not
        what changed.
        """
        return frozenset(
            i
            for i, (original, version) in self._originals.items()
            if version_of(self.tensors[i]) == self._versions[i]
            and version_of(original) == version
            and not _same_bits(self.tensors[i], original)
        )

    def refuse_lost(self, unit: Unit) -> None:
        """Raise MisusedModel where the block changed what cannot be followed."""
        for i in sorted(self.counted() - self._copied):
            name = argument_name(unit.original, self._tree, i)
            raise MisusedModel(
                f"{unit.name} wrote to its argument {name} in place, which it did not do when it "
                "was first called in this way: what was there is needed to compute the block "
                f"again and is gone. Let it {new_tensor(name)} instead"
            )
        for leaf, tensor, version, copy in self._held:
            changed = copy is not None and not _same_bits(tensor, copy)
            if changed or version_of(tensor) != version:
                raise MisusedModel(
                    f"{unit.name} wrote in place to a tensor inside of its argument of type "
                    f"{type(leaf).__name__}, and would write a second time when it is computed "
                    "again: pass such tensors as arguments of their own, or in tuples, lists or "
                    "dicts"
                )
        if self._tree.nests() and not self._tree.is_in(self.arguments, self.tensors):
            raise MisusedModel(
                f"{unit.name} changed a list or dict that it was given (append, pop, or another "
                "value for a key), which its caller would not see: return what is new instead"
            )


@dataclass(frozen=True)
class Source:
    """Where an output of a block is taken from: one of its results or of the caller's arguments."""

    result: int | None
    argument: int | None = None
    view: Geometry | None = None  # None: all of it
    cut: bool = False  # without its gradient

    def take(self, results: Mapping[int, Tensor], arguments: Sequence[Tensor]) -> Tensor:
        """The output, as the caller sees it."""
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


def sources_of(
    outputs: Sequence[Tensor], given: Sequence[Tensor], *, whole: bool
) -> tuple[list[Source], list[Tensor]]:
    """Where each output comes from, and the results that a block has to compute for them.

    whole: of the batch. Of a chunk only outputs that are all of an argument count as that, and
    every output is a result too, because another chunk may differ.
    """
    arguments = {id(_root(tensor)): i for i, tensor in enumerate(given)}
    memory = {_memory(tensor): i for i, tensor in enumerate(given) if tensor.numel()}
    roots = [id(_root(output)) for output in outputs]
    sources: list[Source] = []
    results: list[Tensor] = []
    for output, root in zip(outputs, roots, strict=True):
        argument = arguments.get(root)
        if argument is None and output.numel() and not output.requires_grad:
            argument = memory.get(_memory(output))  # such as x.detach()
        source = None if argument is None else _within(output, given[argument], argument)
        if not whole:
            only = source if source is not None and source.view is None else None
            sources.append(only or Source(len(results)))
            results.append(output)
        elif source is not None:
            sources.append(source)
        elif roots.count(root) > 1 and _root(output).dtype == output.dtype:
            base = _root(output)
            at = next((i for i, r in enumerate(results) if r is base), len(results))
            if at == len(results):
                results.append(base)
            view = None if _is_all_of(output, base) else _geometry(output, base)
            cut = base.requires_grad and not output.requires_grad
            sources.append(Source(at, view=view, cut=cut))
        else:
            sources.append(Source(len(results)))
            results.append(output)
    return sources, results


def merged_sources(by_chunk: Sequence[Sequence[Source]]) -> list[Source]:
    """Of the whole batch: an output is an argument if it is that for each chunk."""
    if len(by_chunk) == 1:
        return list(by_chunk[0])
    return [
        every[0] if all(source == every[0] for source in every) else Source(position)
        for position, every in enumerate(zip(*by_chunk, strict=True))
    ]


def chunk_outputs(
    outputs: Sequence[Sequence[Tensor]],
    pieces: Sequence[Sequence[Tensor]],
    arguments: Sequence[Tensor],
) -> list[Tensor]:
    """Of the whole batch, from those of its chunks and what these were given: an output that is an
    argument is that of the caller."""
    whole: list[Tensor] = []
    for parts in zip(*outputs, strict=True):
        same = (
            argument
            for i, argument in enumerate(arguments)
            if all(same_elements(p, given[i]) for p, given in zip(parts, pieces, strict=True))
        )
        found = next(same, None)
        whole.append(torch.cat(parts) if found is None else found)
    return whole


def write_back(moved: Moved) -> None:
    """What was written to a copy on the device is written to the tensor that it was made of."""
    for theirs, copy, version in moved:
        if version_of(copy) != version:
            theirs.copy_(copy)


def version_counter(tensor: Tensor) -> Tensor:
    """A tensor without memory that counts the writes to `tensor`."""
    counter = tensor.detach()
    if not counter.is_inference():
        counter.data = without_memory(tensor.dtype, tensor.device)
    return counter


def new_tensor(name: str) -> str:
    """The cure of a write in place, for an argument of this name."""
    x = name if name.isidentifier() else "x"
    return f"compute a new tensor ({x} = {x} + 1, not {x} += 1)"


def version_of(tensor: Tensor) -> int:
    """How often it was written to in place; tensors of inference mode do not count."""
    return 0 if tensor.is_inference() else tensor._version


def same_elements(one: Tensor, other: Tensor) -> bool:
    """Are they the same elements of one memory?"""
    return _memory(one) == _memory(other) and _is_all_of(one, other)


def overlap(one: Tensor, other: Tensor) -> bool:
    """Do they have an element in common?"""
    if not (one.numel() and other.numel()) or _memory(one) != _memory(other):
        return False
    if one.dtype != other.dtype:
        return True
    start = min(one.storage_offset(), other.storage_offset())
    end = max(_end(one), _end(other))
    marks = torch.zeros(end - start, dtype=torch.bool)
    for_one = marks.as_strided(one.size(), one.stride(), one.storage_offset() - start)
    for_one.fill_(True)
    for_other = marks.as_strided(other.size(), other.stride(), other.storage_offset() - start)
    return bool(for_other.any())


def is_same(now: Tensor, before: Tensor) -> bool:
    """Equal values, where a NaN equals a NaN."""
    if not now.is_floating_point():
        return torch.equal(now, before)
    return torch.equal(now.isnan(), before.isnan()) and torch.equal(
        now.nan_to_num(0.0, math.inf, -math.inf), before.nan_to_num(0.0, math.inf, -math.inf)
    )


def _same_bits(one: Tensor, other: Tensor) -> bool:
    """Of one size and type: NaNs of the same bits are the same, and 0.0 is not -0.0."""
    return torch.equal(_bits(one), _bits(other))


def _bits(tensor: Tensor) -> Tensor:
    real = tensor.detach().resolve_conj().resolve_neg()
    if real.is_complex():
        real = torch.view_as_real(real)
    return real.view(_BITS[real.element_size()])


def _copy_of_held(tensor: Tensor) -> Tensor | None:
    return same_layout_copy(tensor.detach()) if _can_be_written(tensor) else None


def _within(output: Tensor, given: Tensor, argument: int) -> Source | None:
    """An output that lies in an argument's memory; None if that cannot be told as a view."""
    if output.dtype != given.dtype or output.layout != torch.strided:
        return None
    view = None if _is_all_of(output, given) else _geometry(output, given)
    cut = given.requires_grad and not output.requires_grad
    return Source(None, argument, view, cut)


def _geometry(tensor: Tensor, base: Tensor) -> Geometry:
    start = int(tensor.storage_offset()) - int(base.storage_offset())
    return tensor.size(), tensor.stride(), start


def _is_all_of(tensor: Tensor, base: Tensor) -> bool:
    return (
        tensor.dtype == base.dtype
        and tensor.size() == base.size()
        and tensor.stride() == base.stride()
        and tensor.storage_offset() == base.storage_offset()
    )


def _root(tensor: Tensor) -> Tensor:
    """What it is a view of, for autograd; itself if it is none."""
    base: Tensor | None = tensor._base
    return tensor if base is None else base


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr() if tensor.layout == torch.strided else id(tensor)


def _end(tensor: Tensor) -> int:
    last = sum((n - 1) * s for n, s in zip(tensor.size(), tensor.stride(), strict=True))
    return int(tensor.storage_offset()) + last + 1


def _can_be_written(tensor: Tensor) -> bool:
    """torch refuses to write to an expanded tensor, and a copy of one would be larger than it."""
    return tensor.layout == torch.strided and not (
        any(s == 0 and n > 1 for n, s in zip(tensor.size(), tensor.stride(), strict=True))
    )


def same_layout_copy(tensor: Tensor) -> Tensor:
    """A copy with the same strides, so that the same kernels compute with it."""
    memory = torch.empty_strided(
        tensor.size(), tensor.stride(), dtype=tensor.dtype, device=tensor.device
    )
    return memory.copy_(tensor)
