"""Packed parameters at rest: shape and dtype can be asked, values cannot.

A module tree is walked by many libraries that want names and shapes alone: `state_dict()` detaches
every parameter, and peft's `save_pretrained` keeps the adapters of it. So a detached one has no
values either, and whatever would compute with them is refused.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fluxtrain.errors import MisusedModel

_DATA = Tensor.data.__get__  # type: ignore[attr-defined]
_WITHOUT_VALUES = {Tensor.detach, Tensor.requires_grad_, _DATA, Tensor.data_ptr}
_COMPUTED = {"T", "H", "mT", "mH", "real", "imag"}  # attributes that are tensors with values


class PackedValues(Tensor):
    """What stands for the values of a packed parameter outside of its block's computation."""

    _name: str

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        return without_values(func, args, kwargs or {})


def is_packed(value: Any) -> bool:
    """Is `value` a wrapped parameter whose weights are packed?"""
    owner = getattr(value, "__dict__", {}).get("_fluxtrain")
    return owner is not None and owner.member.segment.packed is not None


def without_values(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Answer what needs no values of packed weights; raise MisusedModel for everything else."""
    name = _name_of(next(v for v in _flat(args, kwargs) if _name_of(v)))
    metadata = getattr(func, "__name__", "") in ("__get__", "__set__") and not _is_computed(func)
    asks = getattr(func, "__name__", "") in _ASKED
    if not (metadata or asks or func in _WITHOUT_VALUES):
        raise MisusedModel(
            f"{name} is packed in 4 or 8 bits outside of its block's computation, so its values "
            "cannot be read or written here: use fluxtrain.unwrap(model) first, which unpacks it, "
            "or `fluxtrain export` for a merged model"
        )
    with torch._C.DisableTorchFunctionSubclass():
        found = func(*args, **kwargs)
        if func in (Tensor.detach, _DATA):
            found = found.as_subclass(PackedValues)
            found._name = name
    return found


_ASKED = {
    "size", "dim", "numel", "element_size", "stride", "is_contiguous", "is_floating_point",
    "is_complex", "storage_offset", "__len__", "nelement", "get_device", "is_inference",
    "untyped_storage", "has_names", "type", "is_shared", "is_pinned", "__hash__", "__repr__",
}  # fmt: skip


def _is_computed(func: Callable[..., Any]) -> bool:
    return getattr(getattr(func, "__self__", None), "__name__", "") in _COMPUTED


def _name_of(value: Any) -> str:
    if isinstance(value, PackedValues):
        return value._name
    return value._fluxtrain.name if is_packed(value) else ""


def _flat(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    found: list[Any] = []
    for value in (*args, *kwargs.values()):
        found += value if isinstance(value, list | tuple) else [value]
    return found
