"""How many parameters a second the native AdamW updates, with all threads. No torch."""

from __future__ import annotations

import ctypes
import mmap

from fluxtrain import _native
from fluxtrain.hardware.rate import Rate, best_rate

PARAMETERS = 128 << 20  # 1.75 GiB: server processors have caches of half a gigabyte
LEAST_PARAMETERS = 1 << 20
_BYTES = {"hi": 2, "lo": 2, "m": 4, "v": 4, "grad": 2}  # of one parameter on a split master
PARAMETER_BYTES = sum(_BYTES.values())
_CUT = 1 << 15  # parameters: each part begins on a page


def adamw_rate(
    available_bytes: int | None = None,
    *,
    parameters: int = PARAMETERS,
    limit_s: float = 1.5,
    threads: int | None = None,
) -> Rate:
    """Parameters a second of an update in bf16 with fp32 masters: 14 bytes kept, 26 moved for each.

    Takes an eighth of `available_bytes` at most. threads None: all that OpenMP has. Raises
    FluxTrainError without the native library.
    """
    if available_bytes is not None:
        parameters = min(parameters, available_bytes // 8 // PARAMETER_BYTES)
    parameters -= parameters % _CUT
    if parameters < LEAST_PARAMETERS:
        return Rate(None, "not measured: too little memory is available")
    update = _native.kernel("adamw_split_bf16")
    # Neither the values nor the coefficients change the time.
    step = _native.AdamWStep(1.0, 1.0, 0.9, 0.1, 0.999, 0.001, 1e-4, 1.0, 1e-8)
    with mmap.mmap(-1, parameters * PARAMETER_BYTES) as memory:
        if hasattr(mmap, "MADV_HUGEPAGE"):
            _ask_for_huge_pages(memory)  # as the arenas of a run do
        start = ctypes.addressof(anchor := ctypes.c_char.from_buffer(memory))
        ctypes.memset(start, 0, len(memory))  # pages that were never written would all be one page
        addresses, offset = [], 0
        for size in _BYTES.values():
            addresses.append(start + offset)
            offset += size * parameters
        rate = best_rate(
            parameters,
            lambda: update(*addresses, parameters, ctypes.byref(step), threads or 0),
            repeats=5,
            limit_s=limit_s,
        )
        del anchor  # it keeps the mapping open
    return Rate(rate, f"{parameters >> 20} M parameters, {_native.isa()}")


def _ask_for_huge_pages(memory: mmap.mmap) -> None:
    try:
        memory.madvise(mmap.MADV_HUGEPAGE)
    except OSError:
        return  # the kernel was built without them
