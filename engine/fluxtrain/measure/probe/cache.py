"""The files in which measurements of a machine are kept, and how long they stay valid."""

from __future__ import annotations

import hashlib
import os
import time
from pathlib import Path
from typing import Protocol, TypeVar

import msgspec

from fluxtrain.errors import FluxTrainError
from fluxtrain.events.answers.machine import Machine
from fluxtrain.files.cache import cache_root, read_entry, write_entry
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
    return cache_root() / f"{kind}-{digest}.json"


class KeptMeasurement(Protocol):
    """The content of such a file."""

    @property
    def format(self) -> int: ...

    @property
    def measured_at_s(self) -> float: ...


_K = TypeVar("_K", bound=KeptMeasurement)


def read_kept(place: Path, kind: type[_K], file_format: int) -> _K | None:
    """Read the kept rates; None without a file, for another format, or if they are no longer
    valid: a week old, or from the future because the clock was set back."""
    kept = read_entry(place, kind)
    if kept is None:
        return None
    age_s = time.time() - kept.measured_at_s
    return kept if kept.format == file_format and -60 < age_s < MAX_AGE_S else None


def keep(place: Path, kept: msgspec.Struct) -> str:
    """Write the file, and return why that failed or ""; the next process then measures again."""
    try:
        write_entry(place, kept)
    except (OSError, FluxTrainError) as error:
        return str(error)
    return ""
