"""Flatten and unflatten tuples, lists and dicts at a third of the cost of torch's pytree.

A block's arguments and outputs are flattened and unflattened some ten times from forward to
backward, and nearly always nest only these types. Their structure is walked by hand, and its
`TreeSpec` is made once. Other types (model outputs, named tuples, registered classes) are left to
pytree.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

# A nesting as (class, keys of a dict, shape of each item). None: it is left to pytree.
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
