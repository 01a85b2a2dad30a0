"""Measures how much host memory CUDA page-locks for a run's arenas, and how fast."""

from __future__ import annotations

import ctypes
import time
from typing import Any

from fluxtrain.events.answers.machine import Rate
from fluxtrain.machine.fresh_memory import fresh, touch
from fluxtrain.machine.page_locking import forget_cuda_error, lock_limit_text
from fluxtrain.measure.probe.rate import TOO_LITTLE
from fluxtrain.units import GIB, MIB, bytes_text

SAMPLE_BYTES = GIB
LEAST_BYTES = 64 * MIB


def pin_rate(available_bytes: int | None = None, *, sample_bytes: int = SAMPLE_BYTES) -> Rate:
    """Measure bytes a second of `cudaHostRegister` on a fresh mapping, as arenas are made.

    Takes an eighth of `available_bytes` at most. `how` compares it with RLIMIT_MEMLOCK, which some
    drivers obey and most do not.
    """
    import torch

    if not torch.cuda.is_available():
        return Rate(None, "not measured: torch has no GPU to use")
    if available_bytes is not None:
        sample_bytes = min(sample_bytes, available_bytes // 8 // MIB * MIB)
    if sample_bytes < LEAST_BYTES:
        return TOO_LITTLE
    torch.zeros(1, device="cuda")  # the context is not part of the time
    runtime: Any = torch.cuda.cudart  # torch gives it no types
    cuda = runtime()
    with fresh(sample_bytes) as memory:
        start_s = time.perf_counter()
        touch(memory)
        anchor = ctypes.c_char.from_buffer(memory)
        error = int(cuda.cudaHostRegister(ctypes.addressof(anchor), sample_bytes, 0))
        taken_s = time.perf_counter() - start_s
        if error == 0:
            cuda.cudaHostUnregister(ctypes.addressof(anchor))
        else:
            forget_cuda_error()
        del anchor  # it keeps the mapping open
    sample = bytes_text(sample_bytes)
    if error:
        return Rate(
            None, f"not measured: CUDA refused to lock {sample} (error {error}){lock_limit_text()}"
        )
    return Rate(sample_bytes / taken_s, f"{sample} locked{lock_limit_text(sample_bytes)}")
