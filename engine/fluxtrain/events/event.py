"""The base of all events: the version of their schema, what every frame carries, and what some tell
of each card."""

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
    """Has the fields of every frame; the emitter fills these four."""

    seq: int = 0
    t_s: float = 0.0  # time.monotonic() of the trainer
    wall_s: float = 0.0  # Unix time
    dropped: int = 0  # live frames dropped so far because the reader was slow


class Gauge(Event, frozen=True, kw_only=True):
    """A sample: the latest wins, and it may be dropped (and counted) when the reader is slow."""


class CardMemory(msgspec.Struct, frozen=True, kw_only=True):
    """One card's share of `MemorySampled`."""

    number: int
    total_bytes: int | None
    used_bytes: int
    peak_bytes: int
    budget_bytes: int | None
    by: dict[str, int]


class CardTraffic(msgspec.Struct, frozen=True, kw_only=True):
    """One card's share of `TrafficSampled`; `landed` came from other cards."""

    number: int
    h2d_bytes: int
    d2h_bytes: int
    landed_bytes: int
    h2d_bytes_per_s: float
    d2h_bytes_per_s: float
    landed_bytes_per_s: float


class CardPlan(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """Tells the share of one of several cards in a plan."""

    number: int  # as gauges and lanes count the cards that compute
    index: int  # torch's
    name: str
    blocks: int
    device_bytes: int  # predicted peak
    budget_bytes: int | None
    edges: bool = False  # embedding and head are on it
    gpu: int | None = None  # nvidia-smi's number of it; None: not known


class CardLeftOut(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """A card of the machine that does not compute, and why."""

    index: int  # torch's
    name: str
    because: str
