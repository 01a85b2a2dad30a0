"""The files in which measurements of a machine are kept, and how long they stay valid."""

from __future__ import annotations

import hashlib
import os
import time
from pathlib import Path

import msgspec

from fluxtrain.client.machine import Machine
from fluxtrain.units import GIB

MAX_AGE_S = 7 * 86_400.0


def cache_file(kind: str, machine: Machine, *more: object) -> Path:
    """Return the file below $XDG_CACHE_HOME/fluxtrain for this host, CPU with the instructions that
    may be used, memory, cards and all else that the measurement depends on (plain values)."""
    memory = machine.memory_total_bytes
    facts = [
        os.uname().nodename,
        machine.cpu_name,
        machine.cores,
        machine.instruction_set,
        None if memory is None else round(memory / GIB),  # a kernel update changes it slightly
        [(gpu.uuid, gpu.name) for gpu in machine.gpus],
        machine.driver,
        *more,
    ]
    digest = hashlib.sha256(msgspec.json.encode(facts)).hexdigest()[:16]
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "fluxtrain" / f"{kind}-{digest}.json"


def is_fresh(measured_at_s: float) -> bool:
    """Return whether a measurement of that Unix time is valid: at most a week old, and not in the
    future (the clock was set back)."""
    age_s = time.time() - measured_at_s
    return -60 < age_s < MAX_AGE_S
