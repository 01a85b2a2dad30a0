"""The arguments of the kernels; native/include/flux_native.h says what they mean."""

from __future__ import annotations

import ctypes
from ctypes import c_float, c_int32, c_size_t, c_uint32, c_void_p
from enum import IntEnum


class WeightFormat(IntEnum):
    """The storage format of an update's weights (enum flux_weight_format)."""

    F32 = 0
    SPLIT_BF16 = 1


class StateFormat(IntEnum):
    """The storage format of an update's moments (enum flux_state_format)."""

    F32 = 0
    BF16 = 1
    EIGHT_BIT = 2


class GradientFormat(IntEnum):
    """The format of an update's gradient (enum flux_gradient_format)."""

    F32 = 0
    BF16 = 1


class Pass(IntEnum):
    """The tensors that an update writes: weights and moments, or one of them (enum flux_pass)."""

    UPDATE = 0
    WEIGHTS = 1
    MOMENTS = 2


STATUS_TEXT = {  # enum flux_status
    1: "its arguments have another size: run `make native`",
    2: "a format or the pass is unknown to it",
    3: "it has no kernel for this combination of formats and pass",
    4: "an array is missing",
    5: "its counts of elements, padding and columns do not go together",
    6: "there is no memory for 4 bytes of each 64 elements",
}


class AdamWStep(ctypes.Structure):
    """The coefficients of one AdamW step, each rounded to fp32 once (struct flux_adamw_step)."""

    _fields_ = (
        ("grad_scale", c_float),
        ("decay", c_float),
        ("beta1", c_float),
        ("one_minus_beta1", c_float),
        ("beta2", c_float),
        ("one_minus_beta2", c_float),
        ("step_size", c_float),
        ("rsqrt_correction2", c_float),
        ("eps", c_float),
    )


class RoundingArgs(ctypes.Structure):
    """The source of the random numbers of a range (struct flux_rounding)."""

    _fields_ = (("first_element", c_uint32), ("first_key", c_uint32), ("second_key", c_uint32))


class AdamWArgs(ctypes.Structure):
    """One call of `flux_adamw` (struct flux_adamw_args); arrays are addresses."""

    _fields_ = (
        ("size", c_uint32),
        ("weight_format", c_uint32),
        ("state_format", c_uint32),
        ("gradient_format", c_uint32),
        ("pass_", c_uint32),
        ("threads", c_int32),
        ("n", c_size_t),
        ("weights", c_void_p),
        ("lo", c_void_p),
        ("m", c_void_p),
        ("v", c_void_p),
        ("m_scale", c_void_p),
        ("v_scale", c_void_p),
        ("gradient", c_void_p),
        ("rounding", RoundingArgs),
        ("step", AdamWStep),
    )

    def __init__(self, **fields: object) -> None:
        super().__init__(size=ctypes.sizeof(AdamWArgs), **fields)


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
