"""The base of all events: the version of their schema, and what every frame carries."""

from __future__ import annotations

from typing import Literal

import msgspec

SCHEMA_MAJOR = 1
SCHEMA_MINOR = 0
SCHEMA = f"{SCHEMA_MAJOR}.{SCHEMA_MINOR}"
FRAME_LIMIT_BYTES = 4096  # PIPE_BUF on Linux: a larger write to a pipe can tear

RunPhase = Literal[
    "starting",
    "loading",
    "training",
    "paused",
    "evaluating",
    "saving",
    "stopping",
    "no space",
    "finished",
    "failed",
]


class Event(msgspec.Struct, frozen=True, kw_only=True, tag_field="event"):
    """What every frame carries; the emitter fills these four."""

    seq: int = 0
    t_s: float = 0.0  # time.monotonic() of the trainer
    wall_s: float = 0.0  # Unix time
    dropped: int = 0  # live frames dropped so far because the reader was slow


class Gauge(Event, frozen=True, kw_only=True):
    """A sample: the latest wins, and it may be dropped (and counted) when the reader is slow."""
