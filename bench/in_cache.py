"""AdamW of what a core's own cache holds: the rate of its arithmetic, without memory.

    python bench/in_cache.py --threads 1 8 16

Each thread is a process of its own, all at the same time: what cores share (frequency, the units of
two threads on one core) slows them here as it does the threads of one update. Each tells that it is
ready and begins when it is told to, which is when all are.
"""

from __future__ import annotations

import argparse
import ctypes
import mmap
import random
import select
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from typing import IO

from children import started_python

from fluxtrain import _native
from fluxtrain.hardware.fresh_memory import fresh

PARAMETERS = 32_768  # 450 KB with fp32 states, 260 with 8-bit ones
KINDS = ("fp32", "8bit")
BLOCK = 256  # parameters of a scale
READY, GO = b"ready\n", b"\n"
SLACK_S = 10.0  # to start and to tell, beside 0.05 for each process


def longest_s(threads: int, seconds: float = 0.5) -> float:
    """What `rates` takes at the most."""
    return 0.05 * threads + len(KINDS) * seconds + SLACK_S


def rates(threads: int, seconds: float = 0.5) -> dict[str, float]:
    """Parameters a second of so many threads together, by kind of states. Raises RuntimeError if a
    process ended, or they were not done in time."""
    ends_s = time.monotonic() + longest_s(threads, seconds)
    arguments = [__file__, "--seconds", str(seconds), "--of-one"]
    pipe = subprocess.PIPE
    found = {}
    with ExitStack() as started:
        processes = [
            started.enter_context(started_python(arguments, stdin=pipe, stdout=pipe, stderr=pipe))
            for _ in range(threads)
        ]
        for kind in KINDS:
            for process in processes:
                if (line := _told(process, ends_s)) != READY:
                    raise RuntimeError(f"{line.decode(errors='replace').strip()} in place of ready")
            for process in processes:
                with suppress(BrokenPipeError):  # it has ended, and `_told` says how
                    _file(process.stdin).write(GO)
            found[kind] = sum(float(_told(process, ends_s)) for process in processes)
    return found


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


def updates(memory: mmap.mmap, codes: mmap.mmap) -> dict[str, Callable[[], object]]:
    """One call of each kernel: fp32 states in `memory`, 8-bit ones in `codes`."""
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    hi, lo, grad, m, v = (start + at * PARAMETERS for at in (0, 2, 4, 6, 10))
    chance = random.Random(0)
    for at, size in ((0, 0.02), (4, 1e-3)):
        for i in range(PARAMETERS):
            bits = struct.pack("<f", chance.gauss(0, size))
            memory[at * PARAMETERS + 2 * i : at * PARAMETERS + 2 * i + 2] = bits[2:]
    m8 = ctypes.addressof(ctypes.c_char.from_buffer(codes))
    m_scale = m8 + 2 * PARAMETERS
    states = _native.States8(m8, m8 + PARAMETERS, m_scale, m_scale + 4 * PARAMETERS // BLOCK)
    step = _native.AdamWStep(1.0, 1.0, 0.9, 0.1, 0.999, 0.001, 1e-4, 1.0, 1e-8)
    fp32, narrow = _native.kernel("adamw_split_bf16"), _native.kernel("adamw8_split_bf16")
    here, with_states = ctypes.byref(step), ctypes.byref(states)
    return {
        "fp32": lambda: fp32(hi, lo, m, v, grad, PARAMETERS, here, 1),
        "8bit": lambda: narrow(hi, lo, with_states, grad, PARAMETERS, here, 1),
    }


def tell(seconds: float) -> None:
    """Parameters a second of this thread, one kind after the other, each when told to begin."""
    memory = fresh(14 * PARAMETERS)
    codes = fresh(2 * PARAMETERS + 8 * PARAMETERS // BLOCK)
    calls = updates(memory, codes)
    for kind in KINDS:
        calls[kind]()
        _say(READY)
        if sys.stdin.buffer.readline() != GO:
            return  # nobody listens any more
        count, start = 0, time.perf_counter()
        while (taken_s := time.perf_counter() - start) < seconds:
            calls[kind]()
            count += 1
        _say(b"%f\n" % (PARAMETERS * count / taken_s))


def _say(line: bytes) -> None:
    sys.stdout.buffer.write(line)
    sys.stdout.buffer.flush()


def main(arguments: Sequence[str] | None = None) -> None:
    """Parse the command line; print one line for each number of threads."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, nargs="*", default=[1])
    parser.add_argument("--seconds", type=float, default=0.5, help="for each kind of states")
    parser.add_argument("--of-one", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.of_one:
        tell(options.seconds)
        return
    for threads in options.threads:
        of_all = rates(threads, options.seconds)
        told = ", ".join(f"{kind} {rate / 1e9:.3f}" for kind, rate in of_all.items())
        print(f"{threads} threads, in cache: {told} G parameters/s")


if __name__ == "__main__":
    main()
