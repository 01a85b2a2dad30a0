"""The arguments of the native kernels for one weight or all weights of a packed segment."""

from __future__ import annotations

import torch
from torch import Tensor

from fluxtrain._native import DenseFormat, PackedFormat, PackingArgs
from fluxtrain.quantization.layout import BLOCK, MEMBER_ELEMENTS, PackedLayout

DENSE_FORMATS = {
    torch.float32: DenseFormat.F32,
    torch.bfloat16: DenseFormat.BF16,
    torch.float16: DenseFormat.F16,
}
_FORMATS = {
    "nf4": PackedFormat.NF4,
    "nf4-double": PackedFormat.NF4_DOUBLE,
    "int8": PackedFormat.INT8,
}


def arguments(
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
        dense_format=DENSE_FORMATS[dense.dtype],
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
