"""The entry through which every weight is packed: the native kernel, or the oracle without it."""

from __future__ import annotations

import torch
from torch import Tensor

from fluxtrain import _native
from fluxtrain.errors import BadInput
from fluxtrain.quantization import reference
from fluxtrain.quantization.layout import PackedLayout
from fluxtrain.quantization.native_call import DENSE_FORMATS, arguments


def pack(
    layout: PackedLayout, index: int, weight: Tensor, packed: Tensor, *, name: str = "a weight"
) -> None:
    """Write weight `index` of the layout into packed (size_bytes,) uint8, contiguous on the host.

    weight has the layout's shape and any floating dtype; all of torch's threads work. Raises
    BadInput if it holds NaN or infinity, which absolute maxima tell: nothing is read twice for it.
    """
    expected = layout.weights[index].shape
    assert tuple(weight.shape) == expected, (name, tuple(weight.shape), expected)
    dense = weight.detach()
    if dense.dtype not in DENSE_FORMATS:
        dense = dense.float()
    dense = dense.cpu().contiguous()  # itself, where it is that already
    if not _native.is_built():
        _refuse(count_not_finite(dense), dense, name)
        reference.pack(layout, index, dense, packed)
        return
    reference.zero_gaps(layout, packed)
    if layout.format == "nf4-double":
        layout.places["map"].of(packed).copy_(reference.dynamic_map())
    _refuse(_native.pack(arguments(layout, index, dense, packed)), dense, name)


def count_not_finite(weight: Tensor) -> int:
    """Count the elements that are NaN or infinite."""
    return int(weight.numel() - torch.isfinite(weight).sum())


def _refuse(not_finite: int, weight: Tensor, name: str) -> None:
    if not_finite:
        raise BadInput(
            f"{name} holds {not_finite:,} values of {weight.numel():,} that are NaN or infinite: "
            "the model's files are damaged, or its training diverged; load another version of it"
        )
