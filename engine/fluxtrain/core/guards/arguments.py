"""Arguments and outputs of a block, flattened to tensors; key-value caches; rows of a batch."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from fluxtrain.errors import MisusedModel

# Tuples, lists and dicts, which nearly all arguments nest, are taken apart by hand, at a third of
# the cost of torch's pytree (ten times a block and step); other types are left to pytree. A nesting
# as (class, keys of a dict, shape of each item). None: it is left to pytree.
Shape = tuple[type, tuple[str, ...], tuple[Any, ...]]

_LEAF: Shape = (object, (), ())
_PLAIN = frozenset({Tensor, nn.Parameter, type(None), bool, int, float, str, torch.dtype})
_KEPT = 1024  # a bound: a dict with new keys in each call makes a new shape each time
_specs: dict[Shape, pytree.TreeSpec] = {}


def take_apart(value: Any) -> tuple[list[Any], pytree.TreeSpec, Shape | None]:
    """Return the leaves of any nesting, its structure, and its shape (None: left to pytree)."""
    leaves: list[Any] = []
    shape = _shape_of(value, leaves)
    if shape is None:
        return *pytree.tree_flatten(value), None
    spec = _specs.get(shape)
    if spec is None:
        if len(_specs) >= _KEPT:
            _specs.clear()
        spec = _specs[shape] = pytree.tree_flatten(value)[1]
    return leaves, spec, shape


def put_together(leaves: Sequence[Any], spec: pytree.TreeSpec, shape: Shape | None) -> Any:
    """Rebuild a nesting that was taken apart, with these leaves."""
    if shape is None:
        return pytree.tree_unflatten(leaves, spec)
    return _built(shape, iter(leaves))


def _shape_of(value: Any, leaves: list[Any]) -> Shape | None:
    """Append the leaves to `leaves`; None as soon as a node is no tuple, list or dict."""
    kind = type(value)
    if kind in _PLAIN:
        leaves.append(value)
        return _LEAF
    keys: tuple[str, ...] = ()
    if kind is dict:
        keys, value = tuple(value), value.values()
        if not all(type(key) is str for key in keys):  # 1 and True are the same key and two names
            return None
    elif kind is not tuple and kind is not list:
        if not pytree.tree_is_leaf(value):
            return None
        leaves.append(value)
        return _LEAF
    parts = []
    for part in value:
        shape = _shape_of(part, leaves)
        if shape is None:
            return None
        parts.append(shape)
    return kind, keys, tuple(parts)


def _built(shape: Shape, leaves: Iterator[Any]) -> Any:
    kind, keys, parts = shape
    if kind is object:
        return next(leaves)
    made = [_built(part, leaves) for part in parts]
    if kind is dict:
        return dict(zip(keys, made, strict=True))
    return made if kind is list else tuple(made)


_CACHE_FLAGS = ("use_cache",)
_NO_CACHE = (Tensor, str, int, float, bool, type(None))
_CHOICES = (bool, str)
_OUTER_NODES = 3  # (args, kwargs), args and kwargs


@dataclass(frozen=True)
class Tree:
    """A nested structure with its tensors taken out."""

    leaves: tuple[Any, ...]  # None where a tensor was
    tensor_at: tuple[int, ...]
    which: tuple[int, ...]  # index of the tensor that is there
    spec: pytree.TreeSpec
    shape: Shape | None = None  # as `spec`; None unless it nests only tuples, lists and dicts

    def fill(self, tensors: Sequence[Tensor]) -> Any:
        """Return the structure with `tensors` in their places."""
        return put_together(self._filled(tensors), self.spec, self.shape)

    def nests(self) -> bool:
        """Return whether a tree of (args, kwargs) has a list, dict or tuple among the arguments."""
        return bool(self.spec.num_nodes - self.spec.num_leaves > _OUTER_NODES)

    def is_in(self, value: Any, tensors: Sequence[Tensor]) -> bool:
        """Return whether `value`, which `fill(tensors)` returned, still has the same objects in
        it."""
        leaves, spec, _ = take_apart(value)
        return bool(spec == self.spec) and all(
            now is before for now, before in zip(leaves, self._filled(tensors), strict=True)
        )

    def structure(self) -> tuple[Any, ...]:
        """Describe the nesting, and where its tensors are (hashable)."""
        spec = self.spec
        return self.shape or (spec.num_nodes, spec.num_leaves), self.tensor_at, self.which

    def choices(self) -> tuple[Any, ...]:
        """Describe the nesting, and the leaves that are choices: flags and strings (hashable)."""
        spec, chosen = self.spec, (x if type(x) in _CHOICES else None for x in self.leaves)
        return self.shape or (spec.num_nodes, spec.num_leaves), self.tensor_at, *chosen

    def _filled(self, tensors: Sequence[Tensor]) -> list[Any]:
        leaves = list(self.leaves)
        for position, tensor in zip(self.tensor_at, self.which, strict=True):
            leaves[position] = tensors[tensor]
        return leaves


def flatten(value: Any, *, once: bool = False) -> tuple[Tree, list[Tensor]]:
    """Take the tensors out of any nesting of tuples, lists, dicts and model outputs.

    once: take out a tensor that is in several places only once, so that `is` comparisons (query and
    key of an attention) and writes in place work on the refilled structure.
    """
    leaves, spec, shape = take_apart(value)
    at: list[int] = []
    tensors: list[Tensor] = []
    which: list[int] = []
    places: dict[int, int] = {}  # by id
    for i, leaf in enumerate(leaves):
        if isinstance(leaf, Tensor):
            place = places.setdefault(id(leaf), len(tensors)) if once else len(tensors)
            if place == len(tensors):
                tensors.append(leaf)
            at.append(i)
            which.append(place)
    rest = list(leaves)
    for i in at:
        rest[i] = None
    return Tree(tuple(rest), tuple(at), tuple(which), spec, shape), tensors


def argument_name(function: Callable[..., Any], tree: Tree, tensor: int) -> str:
    """Return the function's name for the argument (or part of one) that is this tensor."""
    places = list(range(len(tree.leaves)))
    found, _ = pytree.tree_flatten_with_path(pytree.tree_unflatten(places, tree.spec))
    at = tree.tensor_at[tree.which.index(tensor)]
    path = next(path for path, place in found if place == at)
    return _spoken(function, path)


def _spoken(function: Callable[..., Any], path: Any) -> str:
    """Name a path into (args, kwargs): `(0, 1, "key")` is in the second positional argument."""
    by_keyword = path[0].idx == 1
    name = str(path[1].key if by_keyword else path[1].idx)
    if not by_keyword:
        try:
            parameters = list(inspect.signature(function).parameters.values())
        except (TypeError, ValueError):
            parameters = []
        kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.POSITIONAL_ONLY)
        positional = [p.name for p in parameters if p.kind in kinds]
        index = path[1].idx
        name = positional[index] if index < len(positional) else f"number {index + 1}"
    return name + str(pytree.keystr(path[2:]))


def opaque(tree: Tree) -> Iterator[tuple[Any, list[Tensor]]]:
    """Yield arguments that hold tensors but are opaque to pytree (a user's dataclass, say)."""
    for leaf in tree.leaves:
        held = getattr(leaf, "__dict__", None)
        if held and not is_cache(leaf) and not isinstance(leaf, torch.nn.Module):
            tensors = flatten(dict(held))[1]
            if tensors:
                yield leaf, tensors


def is_cache(value: Any) -> bool:
    """Recognise a key-value or state cache by its methods, without importing transformers."""
    if isinstance(value, _NO_CACHE):
        return False
    return any(c.__name__.endswith("Cache") for c in type(value).__mro__) or (
        hasattr(value, "update") and hasattr(value, "get_seq_length")
    )


def has_cache(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether any argument is a cache."""
    return any(is_cache(v) for v in (*args, *kwargs.values()))


def without_caches(
    name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Leave empty caches out of the arguments of a block that runs twice; refuse filled ones.

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
    """Raise MisusedModel for opaque objects with tensors whose gradients would be lost."""
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
    """Count the batch's rows: the first dimension of the first floating-point tensor (B, ...)."""
    for tensor in tensors:
        if tensor.is_floating_point() and tensor.dim() >= 2:
            return tensor.shape[0]
    return None


def splits(tensors: Sequence[Tensor], rows: int) -> tuple[bool, ...]:
    """Tell which tensors carry the batch in their first dimension."""
    return tuple(t.dim() >= 1 and t.shape[0] == rows and rows > 1 for t in tensors)


def ambiguous(
    function: Callable[..., Any], tree: Tree, tensors: Sequence[Tensor], rows: int
) -> str | None:
    """Return the name of an argument (S, S) where S is also the number of rows, so that it may be a
    mask or carry the batch; None if there is none. `position_ids` carry the batch."""
    for index, tensor in enumerate(tensors):
        if tensor.dim() == 2 and tensor.shape[0] == tensor.shape[1] == rows:
            name = argument_name(function, tree, index)
            if name != "position_ids":
                return name
    return None


def slice_rows(
    tensors: Sequence[Tensor], split: Sequence[bool], start: int, stop: int
) -> list[Tensor]:
    """Take rows [start, stop) of the tensors that carry the batch, and the other tensors whole."""
    return [t[start:stop] if s else t for t, s in zip(tensors, split, strict=True)]


Moved = list[
    tuple[Tensor, Tensor, int]
]  # the caller's tensor, its copy on the device, the copy's version


def to_device(value: Any, device: torch.device) -> tuple[Any, Moved]:
    """Move all tensors of a structure to `device`; also return the moved ones. A structure without
    moved tensors is returned itself."""
    if all(x.device == device for x in take_apart(value)[0] if isinstance(x, Tensor)):
        return value, []
    tree, tensors = flatten(value, once=True)
    there = [_moved(t, device) for t in tensors]
    moved = [(t, n, n._version) for t, n in zip(tensors, there, strict=True) if n is not t]
    return tree.fill(there), moved


def write_back(moved: Moved) -> None:
    """Copy each moved tensor that was written to on the device back into the caller's tensor."""
    for theirs, copy, version in moved:
        if copy._version != version:
            theirs.copy_(copy)


def _moved(tensor: Tensor, device: torch.device) -> Tensor:
    if not torch.is_inference_mode_enabled():
        return _copied(tensor, device)
    with torch.inference_mode(False), torch.no_grad():  # the copy counts what is written to it
        return _copied(tensor, device)


def _copied(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy a tensor to the device. A GPU reads page-locked memory later, and a data loader may have
    written the next batch there by then, so it reads a copy of such memory."""
    from_host = device.type == "cuda" and tensor.device.type == "cpu"
    if from_host and not tensor.requires_grad and tensor.is_pinned():
        tensor = torch.empty_like(tensor, pin_memory=True).copy_(tensor)
    return tensor.to(device, non_blocking=True)


def run_with(
    function: Callable[..., Any], arguments: tuple[tuple[Any, ...], dict[str, Any]]
) -> Any:
    """Call `function` with positional and keyword arguments that `Tree.fill` returned."""
    args, kwargs = arguments
    return function(*args, **kwargs)
