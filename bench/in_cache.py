"""AdamW of what a core's own cache holds: the rate of its arithmetic, without memory.

    python bench/in_cache.py --threads 1 8 16

Each thread is a process of its own, all at the same time: what cores share (frequency, the units of
two threads on one core) slows them here as it does the threads of one update. Each tells that it is
ready and begins when it is told to, which is when all are. Between two rounds they wait, so that
these can take turns with updates from memory: a processor does not always run as fast. A clock is
told with each rate, for cores run slower while memory is busy: what arithmetic allows an update is
the rate at the clock that the update has.
"""

from __future__ import annotations

import argparse
import ctypes
import hashlib
import itertools
import mmap
import os
import random
import select
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import IO

from children import started_python

from fluxtrain import _native
from fluxtrain.hardware.fresh_memory import fresh

PARAMETERS = 32_768  # 450 KB with fp32 states, 260 with 8-bit ones
KINDS = ("fp32", "weights", "moments", "bf16", "8bit")
BLOCK = 256  # parameters of a scale
READY, GO = b"ready\n", b"\n"
SECONDS = 0.25  # of each kind
LOOK_S = 0.02  # at one core
SLACK_S = 10.0  # to start and to tell, beside 0.05 for each process

CLOCK_BYTES, CLOCK_TRIES = 16_384, 5  # some 10 microseconds each


@dataclass(frozen=True)
class Rate:
    """Of one kind: parameters a second of all processes, and the fastest one's clock."""

    per_s: float
    clock: float

    def at(self, clock: float) -> float:
        """Parameters a second at another clock."""
        return self.per_s * clock / self.clock


Rates = dict[str, Rate]


def clock() -> float:
    """How fast this core does one operation behind the other now, in any unit: SHA-256, each of
    whose rounds waits for the one before."""
    data, least_s = bytes(CLOCK_BYTES), float("inf")
    for _ in range(CLOCK_TRIES):
        start = time.perf_counter()
        hashlib.sha256(data)
        least_s = min(least_s, time.perf_counter() - start)
    return CLOCK_BYTES / least_s


def longest_s(threads: int, seconds: float = SECONDS) -> float:
    """What `rates` takes at the most."""
    return 0.05 * threads + 1.5 * len(KINDS) * seconds + SLACK_S


def rates(threads: int, seconds: float = SECONDS) -> Rates:
    """Parameters a second of so many threads together, by kind: states, or a pass of fp32 ones.

    Raises RuntimeError if a process ended, or they were not done in time.
    """
    with waiting(threads, seconds) as measure:
        return measure()


@contextmanager
def waiting(
    threads: int, seconds: float = SECONDS, isa: str | None = None
) -> Iterator[Callable[[], Rates]]:
    """So many processes, which wait; each call gives what `rates` does."""
    arguments = [__file__, "--seconds", str(seconds), "--of-one", *(["--isa", isa] if isa else [])]
    pipe = subprocess.PIPE
    with ExitStack() as started:
        processes = [
            started.enter_context(started_python(arguments, stdin=pipe, stdout=pipe, stderr=pipe))
            for _ in range(threads)
        ]

        def measure() -> Rates:
            ends_s = time.monotonic() + longest_s(threads, seconds)
            return {kind: _together(processes, ends_s) for kind in KINDS}

        yield measure


def _together(processes: Sequence[subprocess.Popen[bytes]], ends_s: float) -> Rate:
    """The next kind, of all."""
    for process in processes:
        if (line := _told(process, ends_s)) != READY:
            raise RuntimeError(f"{line.decode(errors='replace').strip()} in place of ready")
    for process in processes:
        with suppress(BrokenPipeError):  # it has ended, and `_told` says how
            _file(process.stdin).write(GO)
    told = [map(float, _told(process, ends_s).split()) for process in processes]
    per_s, clocks = zip(*told, strict=True)
    return Rate(sum(per_s), max(clocks))


def _told(process: subprocess.Popen[bytes], ends_s: float) -> bytes:
    """The next line of a process. Raises RuntimeError if it ended, or the time has."""
    out = _file(process.stdout)
    if not select.select([out], [], [], max(ends_s - time.monotonic(), 0.0))[0]:
        raise RuntimeError("not done in time: the machine is busy")
    line = out.readline()
    if not line:
        errors = _file(process.stderr).read().decode(errors="replace").strip()
        raise RuntimeError(errors[-300:] or f"ended with {process.wait()}")
    return line


def _file(stream: IO[bytes] | None) -> IO[bytes]:
    assert stream is not None, "it was started with pipes"
    return stream


def updates(memory: mmap.mmap, narrow: mmap.mmap) -> dict[str, Callable[[int], object]]:
    """Each kernel, for a number of parameters: fp32 states in `memory`, others' in `narrow`."""
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    hi, lo, grad, m, v = (start + at * PARAMETERS for at in (0, 2, 4, 6, 10))
    chance = random.Random(0)
    for at, size in ((0, 0.02), (4, 1e-3)):
        for i in range(PARAMETERS):
            bits = struct.pack("<f", chance.gauss(0, size))
            memory[at * PARAMETERS + 2 * i : at * PARAMETERS + 2 * i + 2] = bits[2:]
    m16 = ctypes.addressof(ctypes.c_char.from_buffer(narrow))
    v16, m8, v8, m_scale, v_scale = (m16 + at * PARAMETERS for at in (2, 4, 5, 6, 7))
    states = ctypes.byref(_native.States8(m8, v8, m_scale, v_scale))
    key = ctypes.byref(_native.Rounding(0, 1, 2))
    step = ctypes.byref(_native.AdamWStep(1.0, 1.0, 0.9, 0.1, 0.999, 0.001, 1e-4, 1.0, 1e-8))
    fp32, of_8, of_16, weights, moments = (
        _native.kernel(f"adamw{name}_bf16")
        for name in ("_split", "8_split", "16_split", "_weights_split", "_moments")
    )
    return {
        "fp32": lambda n: fp32(hi, lo, m, v, grad, n, step, 1),
        "weights": lambda n: weights(hi, lo, m, v, grad, n, step, 1),
        "moments": lambda n: moments(m, v, grad, n, step, 1),
        "bf16": lambda n: of_16(hi, lo, m16, v16, grad, n, key, step, 1),
        "8bit": lambda n: of_8(hi, lo, states, grad, n, step, 1),
    }


def rate(call: Callable[[int], object], seconds: float) -> float:
    """Parameters a second, without what a call itself costs: that is what one for few takes."""
    count, of_all_s, of_few_s = 0, 0.0, 0.0
    while of_all_s < seconds:
        start = time.perf_counter()
        call(PARAMETERS)
        between = time.perf_counter()
        call(BLOCK)
        of_few_s += time.perf_counter() - between
        of_all_s += between - start
        count += 1
    return (PARAMETERS - BLOCK) * count / (of_all_s - of_few_s)


def quickest_cores(seconds: float = LOOK_S) -> list[int]:
    """The processors that this thread may use, those first that do most in their caches now: where
    others share the machine, one core can do half of what its neighbour does."""
    memory, narrow = fresh(14 * PARAMETERS), fresh(8 * PARAMETERS)
    call = updates(memory, narrow)["8bit"]
    allowed = os.sched_getaffinity(0)
    found: dict[int, float] = {}
    try:
        for core in sorted(allowed):
            os.sched_setaffinity(0, {core})
            call(PARAMETERS)
            found[core] = rate(call, seconds)
    finally:
        os.sched_setaffinity(0, allowed)
    return sorted(found, key=lambda core: -found[core])


@contextmanager
def on_cores(cores: Iterable[int]) -> Iterator[None]:
    """This thread, the kernels' threads and the processes that are started run on these."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    _native.end_threads()  # those to come begin where this one is
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)
        _native.end_threads()


def tell(seconds: float) -> None:
    """Parameters a second of this thread, one kind after the other, each when told to begin."""
    memory, narrow = fresh(14 * PARAMETERS), fresh(8 * PARAMETERS)
    calls = updates(memory, narrow)
    for kind in itertools.cycle(KINDS):
        _say(READY)
        if sys.stdin.buffer.readline() != GO:
            return  # nobody listens any more
        calls[kind](PARAMETERS)
        _say(b"%f %f\n" % (rate(calls[kind], seconds), clock()))


def _say(line: bytes) -> None:
    sys.stdout.buffer.write(line)
    sys.stdout.buffer.flush()


def main(arguments: Sequence[str] | None = None) -> None:
    """Parse the command line; print one line for each number of threads."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, nargs="*", default=[1])
    parser.add_argument("--seconds", type=float, default=SECONDS, help="for each kind")
    parser.add_argument("--isa", choices=_native.ISA_NAMES, help=argparse.SUPPRESS)
    parser.add_argument("--of-one", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.isa:
        _native.set_isa(options.isa)
    if options.of_one:
        tell(options.seconds)
        return
    for threads in options.threads:
        of_all = rates(threads, options.seconds)
        told = ", ".join(f"{kind} {rate.per_s / 1e9:.3f}" for kind, rate in of_all.items())
        print(f"{threads} threads, in cache: {told} G parameters/s")


if __name__ == "__main__":
    main()
