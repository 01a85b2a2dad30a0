"""Finds, loads and types `libflux_native.so`; native/include/flux_native.h is its contract."""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Callable
from ctypes import POINTER, byref, c_int, c_size_t, c_void_p
from functools import lru_cache
from pathlib import Path
from typing import Any

from fluxtrain._native.args import STATUS_TEXT, AdamWArgs, PackingArgs
from fluxtrain.errors import BadInput, FluxTrainError

LIBRARY = "libflux_native.so"
ABI_VERSION = 9
OMP_PAUSE_SOFT = 1  # OpenMP 5.0, omp_pause_resource_t
ISA_VARIABLE = "FLUXTRAIN_ISA"
ISA_NAMES = ("scalar", "avx2", "avx512")


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
    folders = [Path(folder) for folder in sys.modules["fluxtrain._native"].__path__]
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
        raise FluxTrainError(f"{path} does not load ({error}): run `make native`") from error
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
