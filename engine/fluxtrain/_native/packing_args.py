"""The arguments of `flux_pack` and `flux_unpack`, which native/include/flux_native.h explains."""

from __future__ import annotations

import ctypes
from ctypes import c_int32, c_size_t, c_uint32, c_void_p
from enum import IntEnum


class PackedFormat(IntEnum):
    """The format of packed weights (enum flux_packed_format)."""

    NF4 = 0
    NF4_DOUBLE = 1
    INT8 = 2


class DenseFormat(IntEnum):
    """The format of dense weights (enum flux_dense_format)."""

    F32 = 0
    BF16 = 1
    F16 = 2


class PackingArgs(ctypes.Structure):
    """One call of `flux_pack` or `flux_unpack` (struct flux_packing_args); arrays are addresses."""

    _fields_ = (
        ("size", c_uint32),
        ("format", c_uint32),
        ("dense_format", c_uint32),
        ("threads", c_int32),
        ("n", c_size_t),
        ("padded", c_size_t),
        ("columns", c_size_t),
        ("dense", c_void_p),
        ("codes", c_void_p),
        ("absmax", c_void_p),
        ("scales", c_void_p),
        ("offsets", c_void_p),
        ("map", c_void_p),
        ("not_finite", c_size_t),
    )

    def __init__(self, **fields: object) -> None:
        super().__init__(size=ctypes.sizeof(PackingArgs), **fields)
