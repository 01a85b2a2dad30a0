"""Measures how fast bytes move and numbers are multiplied, through torch as in training.

Each measurement takes a second or two at most and frees its memory. Rates count the bytes of one
copy once, although the memory is read and written.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from fluxtrain.events.answers.machine import Rate
from fluxtrain.machine.fresh_memory import fresh, touch
from fluxtrain.machine.page_locking import forget_cuda_error, lock_limit_text
from fluxtrain.measure.probe.rate import TOO_LITTLE, best_rate
from fluxtrain.units import GIB, MIB, bytes_text

if TYPE_CHECKING:
    import torch

COPY_BYTES = 256 * MIB
LEAST_COPY_BYTES = 4 * MIB
REPEATS = 5
LIMIT_S = 1.5
BUS_LIMIT_S = 1.0  # for each of five measurements
BUS_RATES = (
    *("h2d_pinned", "d2h_pinned", "h2d_both_ways", "d2h_both_ways"),
    *("h2d_pageable", "d2h_pageable"),
)


@contextmanager
def at_most_threads(threads: int | None) -> Iterator[int]:
    """Limit torch to `threads` inside the context; yield how many threads it uses.

    Under a CPU quota more threads than its cores are fast for some milliseconds and then stand
    still: the fastest of several short calls would be a rate that no training reaches.
    """
    import torch

    before = torch.get_num_threads()
    used = before if threads is None else min(before, threads)
    torch.set_num_threads(used)
    try:
        yield used
    finally:
        torch.set_num_threads(before)


def sample_bytes(available_bytes: int | None) -> int:
    """Return the size of one buffer: several exist at once and must fit a small container too."""
    if available_bytes is None:
        return COPY_BYTES
    return min(COPY_BYTES, available_bytes // 8 // MIB * MIB)


def host_copy_rate(
    size_bytes: int = COPY_BYTES, limit_s: float = LIMIT_S, *, threads: int | None = None
) -> Rate:
    """Measure bytes a second of a copy in host memory, with `threads` (None: all of torch's)."""
    import torch

    if size_bytes < LEAST_COPY_BYTES:
        return TOO_LITTLE
    source = torch.ones(size_bytes, dtype=torch.uint8)
    target = torch.empty_like(source)
    with at_most_threads(threads) as used:
        rate = best_rate(size_bytes, lambda: target.copy_(source), repeats=REPEATS, limit_s=limit_s)
    return Rate(rate, f"{bytes_text(size_bytes)}, {used} thread{'s' * (used != 1)}")


def matmul_rate(
    device: str = "cpu", limit_s: float = LIMIT_S, *, threads: int | None = None
) -> Rate:
    """Measure operations a second (2 n^3) of a square product: bf16 on a GPU that has it, fp32 on a
    CPU.

    The CPU uses `threads` (None: all of torch's).
    """
    import torch

    n, dtype = 1024, torch.float32
    if device != "cpu":
        n = 8192
        real = torch.cuda.is_bf16_supported(including_emulation=False)
        dtype = torch.bfloat16 if real else torch.float16
    drawn = torch.Generator(device).manual_seed(0)
    left, right = (
        torch.randn(n, n, device=device, dtype=torch.float32, generator=drawn).to(dtype)
        for _ in range(2)
    )
    product = torch.empty_like(left)

    def multiply() -> None:
        torch.mm(left, right, out=product)
        if device != "cpu":
            torch.cuda.synchronize(device)

    with at_most_threads(threads):
        rate = best_rate(2.0 * n**3, multiply, repeats=2 * REPEATS, limit_s=limit_s)
    return Rate(rate, f"{n} x {n} {str(dtype).removeprefix('torch.')}")


def bus_rates(
    device: str = "cuda",
    limit_s: float = BUS_LIMIT_S,
    size_bytes: int = COPY_BYTES,
    *,
    pageable: bool = True,
) -> dict[str, Rate]:
    """Measure bytes a second between host and GPU for each of `BUS_RATES`.

    Pinned each way alone, pinned both ways at once (some hosts collapse then), and `pageable`. The
    device must be torch's current one.
    """
    import torch

    if not torch.cuda.is_available():
        return dict.fromkeys(BUS_RATES, Rate(None, "not measured: torch has no GPU to use"))
    if size_bytes < LEAST_COPY_BYTES:
        return dict.fromkeys(BUS_RATES, TOO_LITTLE)
    on_device = torch.ones(size_bytes, dtype=torch.uint8, device=device)
    landing = torch.empty_like(on_device)
    rates: dict[str, Rate] = {}
    try:
        pinned = torch.ones(size_bytes, dtype=torch.uint8, pin_memory=True)
        home = torch.empty(size_bytes, dtype=torch.uint8, pin_memory=True)
    except RuntimeError as error:  # the limit of locked memory
        why = Rate(None, f"not measured: memory cannot be pinned: {str(error).splitlines()[0]}")
        rates |= dict.fromkeys(BUS_RATES[:4], why)
    else:
        rates["h2d_pinned"] = _copy_rate(landing, pinned, limit_s)
        rates["d2h_pinned"] = _copy_rate(home, on_device, limit_s)
        up, down = _rates_both_ways(landing, pinned, home, on_device, limit_s)
        rates |= {"h2d_both_ways": up, "d2h_both_ways": down}
    if pageable:
        ordinary = torch.ones(size_bytes, dtype=torch.uint8)
        rates["h2d_pageable"] = _copy_rate(landing, ordinary, limit_s)
        rates["d2h_pageable"] = _copy_rate(ordinary, on_device, limit_s)
    return rates


def _copy_rate(target: torch.Tensor, source: torch.Tensor, limit_s: float) -> Rate:
    import torch

    def copy() -> None:
        target.copy_(source, non_blocking=True)
        torch.cuda.synchronize()

    rate = best_rate(source.nbytes, copy, repeats=REPEATS, limit_s=limit_s)
    return Rate(rate, bytes_text(source.nbytes))


def _rates_both_ways(
    landing: torch.Tensor,
    pinned: torch.Tensor,
    home: torch.Tensor,
    on_device: torch.Tensor,
    limit_s: float,
) -> tuple[Rate, Rate]:
    """Measure both directions at once; each is timed by the events of its own stream."""
    import torch

    make_stream: Any = torch.cuda.Stream  # torch has no types for either
    make_event: Any = torch.cuda.Event
    streams = [make_stream() for _ in range(2)]
    ends = [[make_event(enable_timing=True) for _ in range(2)] for _ in streams]
    fastest_s = [float("inf")] * 2

    def copy_both() -> None:
        torch.cuda.synchronize()
        pairs = ((landing, pinned), (home, on_device))
        for stream, (before, after), (target, source) in zip(streams, ends, pairs, strict=True):
            with torch.cuda.stream(stream):
                before.record(stream)
                target.copy_(source, non_blocking=True)
                after.record(stream)
        torch.cuda.synchronize()
        for way, (before, after) in enumerate(ends):
            fastest_s[way] = min(fastest_s[way], before.elapsed_time(after) / 1e3)

    best_rate(pinned.nbytes, copy_both, repeats=REPEATS, limit_s=limit_s)
    how = f"{bytes_text(pinned.nbytes)} each way at once"
    return Rate(pinned.nbytes / fastest_s[0], how), Rate(pinned.nbytes / fastest_s[1], how)


PIN_BYTES = GIB
LEAST_PIN_BYTES = 64 * MIB


def pin_rate(available_bytes: int | None = None, *, sample_bytes: int = PIN_BYTES) -> Rate:
    """Measure bytes a second of `cudaHostRegister` on a fresh mapping, as arenas are made.

    Takes an eighth of `available_bytes` at most. `how` compares it with RLIMIT_MEMLOCK, which some
    drivers obey and most do not.
    """
    import torch

    if not torch.cuda.is_available():
        return Rate(None, "not measured: torch has no GPU to use")
    if available_bytes is not None:
        sample_bytes = min(sample_bytes, available_bytes // 8 // MIB * MIB)
    if sample_bytes < LEAST_PIN_BYTES:
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
