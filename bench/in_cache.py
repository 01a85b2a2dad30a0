"""AdamW of what a core's own cache holds: the rate of its arithmetic, without memory.

    python bench/in_cache.py --threads 1 8 16

Each thread is a process of its own, all at the same time: what cores share (frequency, the units of
two threads on one core) slows them here as it does the threads of one update.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import mmap
import random
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack

from children import started_python

from fluxtrain import _native

PARAMETERS = 32_768  # 450 KB with fp32 states, 260 with 8-bit ones
KINDS = ("fp32", "8bit")
BLOCK = 256  # parameters of a scale
FIRST_S = 1.0  # until all have started, and 0.05 for each
SLACK_S = 10.0  # for the rest, until all have told


def longest_s(threads: int, seconds: float = 0.5) -> float:
    """What `rates` takes at the most."""
    return FIRST_S + 0.05 * threads + len(KINDS) * seconds + SLACK_S


def rates(threads: int, seconds: float = 0.5) -> dict[str, float]:
    """Parameters a second of so many threads together, by kind of states. Raises RuntimeError if a
    process was not ready, or not done, in time."""
    ends_s = time.time() + longest_s(threads, seconds)
    begins_s = ends_s - SLACK_S - len(KINDS) * seconds
    arguments = [__file__, "--begins-s", str(begins_s), "--seconds", str(seconds)]
    with ExitStack() as started:
        processes = [
            started.enter_context(
                started_python(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
            )
            for _ in range(threads)
        ]
        try:
            told = [p.communicate(timeout=ends_s - time.time()) for p in processes]
        except subprocess.TimeoutExpired as error:
            raise RuntimeError(f"not done {SLACK_S:g} s after the time: busy") from error
    for process, (_, errors) in zip(processes, told, strict=True):
        if process.returncode != 0:
            told_why = errors.decode(errors="replace").strip()[-300:]
            raise RuntimeError(told_why or f"ended with {process.returncode}")
    of_each = [json.loads(out) for out, _ in told]
    return {kind: sum(found[kind] for found in of_each) for kind in KINDS}


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


def measured(begins_s: float, seconds: float) -> dict[str, float]:
    """Parameters a second of this thread, one kind after the other; the first begins at that time
    of the clock, the second `seconds` later."""
    found = {}
    memory = mmap.mmap(-1, 14 * PARAMETERS)
    codes = mmap.mmap(-1, 2 * PARAMETERS + 8 * PARAMETERS // BLOCK)
    calls = updates(memory, codes)
    for kind in KINDS:
        calls[kind]()
        wait_s = begins_s - time.time()
        if wait_s < 0:
            sys.exit(f"{-wait_s:.2f} s too late: the machine is busy")
        time.sleep(wait_s)
        count, start = 0, time.perf_counter()
        while (taken_s := time.perf_counter() - start) < 0.9 * seconds:
            calls[kind]()
            count += 1
        found[kind] = PARAMETERS * count / taken_s
        begins_s += seconds
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    """Parse the command line; print one line for each number of threads."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, nargs="*", default=[1])
    parser.add_argument("--seconds", type=float, default=0.5, help="for each kind of states")
    parser.add_argument("--begins-s", type=float, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.begins_s is not None:
        print(json.dumps(measured(options.begins_s, options.seconds)))
        return
    for threads in options.threads:
        of_all = rates(threads, options.seconds)
        told = ", ".join(f"{kind} {rate / 1e9:.3f}" for kind, rate in of_all.items())
        print(f"{threads} threads, in cache: {told} G parameters/s")


if __name__ == "__main__":
    main()
