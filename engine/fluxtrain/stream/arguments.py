"""What goes into a block and comes out of it, flattened to tensors; caches; rows of a batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from fluxtrain.errors import MisusedModel

_CACHE_FLAGS = ("use_cache",)


@dataclass(frozen=True)
class Tree:
    """A nested structure with its tensors taken out."""

    leaves: tuple[Any, ...]  # None where a tensor was
    tensor_at: tuple[int, ...]
    spec: pytree.TreeSpec

    def fill(self, tensors: Sequence[Tensor]) -> Any:
        """The structure with `tensors` in their places."""
        leaves = list(self.leaves)
        for position, tensor in zip(self.tensor_at, tensors, strict=True):
            leaves[position] = tensor
        return pytree.tree_unflatten(leaves, self.spec)


def flatten(value: Any) -> tuple[Tree, list[Tensor]]:
    """Take the tensors out of any nesting of tuples, lists, dicts and model outputs."""
    leaves, spec = pytree.tree_flatten(value)
    at = tuple(i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor))
    tensors = [leaves[i] for i in at]
    rest = tuple(None if isinstance(leaf, Tensor) else leaf for leaf in leaves)
    return Tree(rest, at, spec), tensors


def is_cache(value: Any) -> bool:
    """A key-value or state cache, by what it can do (no import of transformers)."""
    if isinstance(value, Tensor | str | int | float | bool | type(None)):
        return False
    return any(c.__name__.endswith("Cache") for c in type(value).__mro__) or (
        hasattr(value, "update") and hasattr(value, "get_seq_length")
    )


def has_cache(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Is any argument, in whatever position, a cache?"""
    return any(is_cache(v) for v in (*args, *kwargs.values()))


def without_caches(
    name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments for a block that runs twice: empty caches are left out, filled ones refused.

    A recomputed block would append its keys a second time: the loss stays equal while gradients
    are wrong by up to 90 %.
    """

    def strip(value: Any) -> Any:
        if not is_cache(value):
            return value
        if _cache_length(value) > 0:
            raise MisusedModel(
                f"{name} got a cache that already holds {_cache_length(value)} positions while "
                "gradients are on: a wrapped block runs twice and would append to it again. Run "
                "under torch.no_grad(), or pass past_key_values=None when training"
            )
        return None

    kept = {k: strip(v) for k, v in kwargs.items()}
    for flag in _CACHE_FLAGS:
        if kept.get(flag) is True:
            kept[flag] = False
    return tuple(strip(a) for a in args), kept


def refuse_hidden_gradients(name: str, tree: Tree) -> None:
    """Opaque objects that hold tensors with gradients would lose them silently."""
    for leaf in tree.leaves:
        held = getattr(leaf, "__dict__", None)
        if held and any(isinstance(v, Tensor) and v.requires_grad for v in held.values()):
            raise MisusedModel(
                f"{name} got a {type(leaf).__name__} that holds tensors with gradients: pass such "
                "tensors as arguments of their own, or in tuples, lists or dicts"
            )


def _cache_length(cache: Any) -> int:
    length = getattr(cache, "get_seq_length", None)
    if length is not None:
        return int(length())
    return int(any(isinstance(v, Tensor) and v.numel() for v in vars(cache).values()))


def batch_rows(tensors: Sequence[Tensor]) -> int | None:
    """Rows of the batch: the first dimension of the first floating-point tensor (B, ...)."""
    for tensor in tensors:
        if tensor.is_floating_point() and tensor.dim() >= 2:
            return tensor.shape[0]
    return None


def splits(tensors: Sequence[Tensor], rows: int) -> tuple[bool, ...]:
    """Which tensors carry the batch in their first dimension."""
    return tuple(t.dim() >= 1 and t.shape[0] == rows and rows > 1 for t in tensors)


def ambiguous(tensors: Sequence[Tensor], rows: int) -> bool:
    """A (S, S) mask with as many rows as the batch has cannot be told from a batched tensor."""
    return any(t.dim() == 2 and t.shape[0] == t.shape[1] == rows for t in tensors)


def piece(tensors: Sequence[Tensor], split: Sequence[bool], start: int, stop: int) -> list[Tensor]:
    """Rows [start, stop) of the tensors that carry the batch, the others whole."""
    return [t[start:stop] if s else t for t, s in zip(tensors, split, strict=True)]


def to_device(value: Any, device: torch.device) -> Any:
    """All tensors of a structure on `device`; the same structure when they are there already."""
    tree, tensors = flatten(value)
    if all(t.device == device for t in tensors):
        return value
    return tree.fill([t.to(device, non_blocking=True) for t in tensors])
