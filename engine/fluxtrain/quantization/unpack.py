"""The entry through which packed weights become dense: by the fastest of equal implementations."""

from __future__ import annotations

from types import ModuleType

from torch import Tensor

from fluxtrain import _native
from fluxtrain.quantization import reference
from fluxtrain.quantization.layout import PackedLayout
from fluxtrain.quantization.native_call import DENSE_FORMATS, arguments


def unpack(layout: PackedLayout, packed: Tensor, out: Tensor) -> None:
    """Compute the dense form of packed (size_bytes,) uint8 into out (elements,), contiguous.

    out is bf16, fp16 or fp32, on the device of `packed`. Each product is rounded to fp32, and the
    last to out's dtype, to nearest with ties to even. On a GPU it runs on the current stream.
    """
    assert out.shape == (layout.elements,), (tuple(out.shape), layout.elements)
    assert out.is_contiguous() and packed.is_contiguous()
    if out.is_cuda and (triton := _triton()) is not None:
        triton.unpack(layout, packed, out)
    elif out.device.type == "cpu" and out.dtype in DENSE_FORMATS and _native.is_built():
        _native_unpack(layout, packed, out)
    else:
        reference.unpack(layout, packed, out)


def _triton() -> ModuleType | None:
    """Return the module with the Triton kernels, None where Triton does not work."""
    try:
        from fluxtrain.quantization import triton_unpack
    except ImportError:
        return None
    return triton_unpack if triton_unpack.AVAILABLE else None


def _native_unpack(layout: PackedLayout, packed: Tensor, out: Tensor) -> None:
    if layout.format != "int8":  # blocks know no weights: all at once
        _native.unpack(arguments(layout, None, out, packed))
        return
    for index, weight in enumerate(layout.weights):
        dense = out[weight.first : weight.first + weight.padded]
        _native.unpack(arguments(layout, index, dense, packed))
