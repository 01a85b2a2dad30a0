"""Packing and unpacking of weights: by the native kernels or Triton's, else by the oracle."""

from __future__ import annotations

from types import ModuleType

import torch
from torch import Tensor

from fluxtrain import _native
from fluxtrain._native import DenseFormat, PackedFormat, PackingArgs
from fluxtrain.core.quantization import reference
from fluxtrain.core.quantization.layout import BLOCK, MEMBER_ELEMENTS, PackedLayout
from fluxtrain.errors import BadInput

_DENSE_FORMATS = {
    torch.float32: DenseFormat.F32,
    torch.bfloat16: DenseFormat.BF16,
    torch.float16: DenseFormat.F16,
}
_FORMATS = {
    "nf4": PackedFormat.NF4,
    "nf4-double": PackedFormat.NF4_DOUBLE,
    "int8": PackedFormat.INT8,
}


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
    if dense.dtype not in _DENSE_FORMATS:
        dense = dense.float()
    dense = dense.cpu().contiguous()  # itself, where it is that already
    reference.zero_gaps(layout, packed)
    if layout.format == "nf4-double":
        layout.places["map"].of(packed).copy_(reference.dynamic_map())
    not_finite = _native.pack(_arguments(layout, index, dense, packed))
    if not_finite:
        raise BadInput(
            f"{name} holds {not_finite:,} values of {dense.numel():,} that are NaN or infinite: "
            "the model's files are damaged, or its training diverged; load another version of it"
        )


def unpack(layout: PackedLayout, packed: Tensor, out: Tensor) -> None:
    """Compute the dense form of packed (size_bytes,) uint8 into out (elements,), contiguous.

    out is bf16, fp16 or fp32, on the device of `packed`. Each product is rounded to fp32, and the
    last to out's dtype, to nearest with ties to even. On a GPU it runs on the current stream.
    """
    assert out.shape == (layout.elements,), (tuple(out.shape), layout.elements)
    assert out.is_contiguous() and packed.is_contiguous()
    if out.is_cuda and (triton := _triton()) is not None:
        triton.unpack(layout, packed, out)
    elif out.device.type == "cpu" and out.dtype in _DENSE_FORMATS:
        _native_unpack(layout, packed, out)
    else:
        reference.unpack(layout, packed, out)


def _triton() -> ModuleType | None:
    """Return the module with the Triton kernels, None where Triton does not work."""
    try:
        from fluxtrain.core.quantization import triton_unpack
    except ImportError:
        return None
    return triton_unpack if triton_unpack.AVAILABLE else None


def _native_unpack(layout: PackedLayout, packed: Tensor, out: Tensor) -> None:
    if layout.format != "int8":  # blocks know no weights: all at once
        _native.unpack(_arguments(layout, None, out, packed))
        return
    for index, weight in enumerate(layout.weights):
        dense = out[weight.first : weight.first + weight.padded]
        _native.unpack(_arguments(layout, index, dense, packed))


def _arguments(
    layout: PackedLayout, index: int | None, dense: Tensor, packed: Tensor
) -> PackingArgs:
    """Describe weight `index`, or all (index None: not of int8), with its contiguous dense form.

    Tensors must outlive the call: the arguments hold addresses.
    """
    first, count, padded, columns, first_row = 0, layout.elements, layout.elements, 0, 0
    if index is not None:
        weight = layout.weights[index]
        first, count, padded = weight.first, weight.count, weight.padded
        columns, first_row = weight.columns, weight.first_row
    base, places = packed.data_ptr(), layout.places
    at = {
        "codes": first if layout.format == "int8" else first // 2,
        "absmax": first_row if layout.format == "int8" else first // BLOCK,
        "scales": first // MEMBER_ELEMENTS,
        "offsets": first // MEMBER_ELEMENTS,
        "map": 0,
    }
    return PackingArgs(
        format=_FORMATS[layout.format],
        dense_format=_DENSE_FORMATS[dense.dtype],
        threads=torch.get_num_threads(),
        n=count,
        padded=padded,
        columns=columns,
        dense=dense.data_ptr(),
        **{
            name: base + place.offset_bytes + at[name] * place.dtype.itemsize
            for name, place in places.items()
        },
    )
