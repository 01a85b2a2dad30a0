"""Calls the host kernels of `native/` with plain addresses. ctypes releases the GIL meanwhile.

Nothing is loaded at import: the library is found, typed and checked when the first kernel is
called. native/include/flux_native.h says what the arguments mean."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from ctypes import POINTER, byref, c_float, c_int, c_int32, c_size_t, c_uint32, c_void_p
from enum import IntEnum
from functools import lru_cache
from pathlib import Path
from typing import Any

from fluxtrain.errors import BadInput, FluxTrainError

LIBRARY = "libflux_native.so"
ABI_VERSION = 9
OMP_PAUSE_SOFT = 1  # OpenMP 5.0, omp_pause_resource_t
ISA_VARIABLE = "FLUXTRAIN_ISA"
ISA_NAMES = ("scalar", "avx2", "avx512")


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


_SIGNATURES: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "flux_abi_version": (c_int, ()),
    "flux_isa": (c_int, ()),
    "flux_set_isa": (c_int, (c_int,)),
    "flux_zero": (None, (c_void_p, c_size_t, c_int)),
    "flux_adamw": (c_int, (POINTER(AdamWArgs),)),
    "flux_adamw_stream": (c_int, (POINTER(AdamWArgs),)),
    "flux_pack": (c_int, (POINTER(PackingArgs),)),
    "flux_unpack": (c_int, (POINTER(PackingArgs),)),
    "flux_quantise8": (None, (c_void_p, c_void_p, c_void_p, c_size_t, c_int, c_int)),
    "flux_encode8": (None, (c_void_p, c_void_p, c_size_t, c_int)),
    "flux_decode8": (None, (c_void_p, c_void_p, c_size_t, c_int)),
}


def refuse_unknown_isa(wish: str | None) -> None:
    """Raise BadInput for a requested instruction set that the library would ignore as unknown; an
    empty request is valid."""
    if wish and wish not in ISA_NAMES:
        raise BadInput(
            f"{ISA_VARIABLE} is {wish!r}: use {', '.join(ISA_NAMES[:-1])} or {ISA_NAMES[-1]}, or "
            "leave it out for the best that the processor has"
        )


def library_path() -> Path:
    """Return the path of the library; raises FluxTrainError if it was never built.

    In an editable install the package has two folders: one with the sources, one with the library.
    """
    folders = [Path(folder) for folder in __path__]
    for folder in folders:
        if (folder / LIBRARY).is_file():
            return folder / LIBRARY
    looked = ", ".join(str(folder) for folder in folders)
    raise FluxTrainError(f"{LIBRARY} is not in {looked}: run `make native`")


@lru_cache(maxsize=1)
def _library() -> ctypes.CDLL:
    return load(library_path())


def load(path: Path) -> ctypes.CDLL:
    """Load the library at `path` and type its functions; raise FluxTrainError if it is not ours."""
    refuse_unknown_isa(os.environ.get(ISA_VARIABLE))
    try:
        library = ctypes.CDLL(str(path))
        for name, (result, arguments) in _SIGNATURES.items():
            function = getattr(library, name)
            function.restype = result
            function.argtypes = arguments
    except (OSError, AttributeError) as error:
        cure = "install FluxTrain again, or run `make native` in a checkout"
        if "libgomp" in str(error):  # torch brings one, on the processors that it has wheels for
            cure = "install libgomp (Debian, Ubuntu: apt install libgomp1)"
        raise FluxTrainError(f"{path} does not load ({error}): {cure}") from error
    version = library.flux_abi_version()
    if version != ABI_VERSION:
        raise FluxTrainError(
            f"{path} speaks version {version} of the kernel interface and this FluxTrain speaks "
            f"{ABI_VERSION}: run `make native`"
        )
    return library


def kernel(name: str) -> Callable[..., Any]:
    """Return the typed C function `flux_<name>`; arrays are passed as addresses (ints)."""
    function: Callable[..., Any] = getattr(_library(), f"flux_{name}")
    return function


def adamw(args: AdamWArgs, *, moves_only: bool = False) -> None:
    """Run `flux_adamw` over one flat range; raises ValueError if the library refuses `args`.

    The caller must pass valid addresses. `moves_only`: `flux_adamw_stream`, for measurements.
    """
    name = "adamw_stream" if moves_only else "adamw"
    status = kernel(name)(byref(args))
    if status != 0:
        raise ValueError(f"flux_{name} refuses the call: {STATUS_TEXT.get(status, status)}")


def pack(args: PackingArgs) -> int:
    """Run `flux_pack` over one weight; return how many of its elements are NaN or infinite.

    The caller must pass valid addresses. Raises ValueError if the library refuses `args`.
    """
    _packing("pack", args)
    return int(args.not_finite)


def unpack(args: PackingArgs) -> None:
    """Run `flux_unpack` over one range; raises ValueError if the library refuses `args`."""
    _packing("unpack", args)


def _packing(name: str, args: PackingArgs) -> None:
    status = kernel(name)(byref(args))
    if status != 0:
        raise ValueError(f"flux_{name} refuses the call: {STATUS_TEXT.get(status, status)}")


def end_threads() -> None:
    """End the OpenMP threads that serve the calling thread; its next kernel starts new ones, in
    some 20 us each. Does nothing before OpenMP 5.0, which cannot end them.

    Kernels on other threads of the process have threads of their own and continue.
    """
    openmp = _library()  # its symbols are found through the library that uses it
    pause = getattr(openmp, "omp_pause_resource", None)
    if pause is not None:
        pause(OMP_PAUSE_SOFT, openmp.omp_get_initial_device())


def isa() -> str:
    """Return the instruction set in use: scalar, avx2 or avx512."""
    return ISA_NAMES[kernel("isa")()]


def set_isa(name: str) -> str:
    """Use instruction set `name`, or the best allowed below it; return the set now in use.

    For tests and measurements: results do not depend on it. Never higher than the processor and
    FLUXTRAIN_ISA allow.
    """
    return ISA_NAMES[kernel("set_isa")(ISA_NAMES.index(name))]
