"""Runs on several cards, of the real event classes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from msgspec.structs import replace

from fluxtrain.events import events as ev
from fluxtrain.events.trace.lanes import Interval, StepLanes
from fluxtrain.events.trace.ring import RingWriter
from fluxtui.panels.card_colours import letter_of
from tests.tui import made_runs as made

GIB = made.GIB
BLOCKS = 32
NAME = "NVIDIA RTX 4090"
BY = (("weights", 6), ("gradients", 2), ("optimizer", 5), ("activations", 4), ("workspace", 1))


def planned(cards: int) -> ev.Planned:
    each = tuple(
        ev.CardPlan(
            number=at, index=at, name=NAME, blocks=len(range(at, BLOCKS, cards)),
            device_bytes=19 * GIB, budget_bytes=23 * GIB, edges=at == 0, gpu=at,
        )
        for at in range(cards)
    )  # fmt: skip
    left = ev.CardLeftOut(
        index=cards, name="GTX 1060",
        because="6.20 s a step (1,320 tokens/s) predicted with it, 66% of the speed without",
    )  # fmt: skip
    return replace(
        made.planned(), cards=each, left_out=(left,), device_bytes=19 * cards * GIB,
        device_budget_bytes=23 * cards * GIB,
    )  # fmt: skip


def memory(number: int, cards: int) -> ev.MemorySampled:
    each = tuple(
        ev.CardMemory(
            number=at, total_bytes=24 * GIB, budget_bytes=23 * GIB, peak_bytes=(18 + at % 2) * GIB,
            by={name: size * GIB - at * (GIB >> 3) + (number % 5 << 25) for name, size in BY},
            used_bytes=sum(size * GIB - at * (GIB >> 3) + (number % 5 << 25) for _, size in BY),
        )
        for at in range(cards)
    )  # fmt: skip
    return replace(
        made.memory(number), cards=each, device_used_bytes=sum(one.used_bytes for one in each),
        device_by={name: sum(one.by[name] for one in each) for name, _ in BY},
        device_peak_bytes=sum(one.peak_bytes for one in each),
        device_budget_bytes=23 * cards * GIB, device_total_bytes=24 * cards * GIB,
    )  # fmt: skip


def traffic(number: int, cards: int) -> ev.TrafficSampled:
    each = tuple(
        ev.CardTraffic(
            number=at, h2d_bytes=10**9 * number, d2h_bytes=10**9 * number, landed_bytes=10**8,
            h2d_bytes_per_s=2.1e10 / (1 + at % 2), d2h_bytes_per_s=1.2e10 + 1e9 * math.sin(number),
            landed_bytes_per_s=3.2e9,
        )
        for at in range(cards)
    )  # fmt: skip
    return replace(
        made.traffic(number), cards=each, h2d_bytes_per_s=sum(c.h2d_bytes_per_s for c in each),
        d2h_bytes_per_s=sum(c.d2h_bytes_per_s for c in each),
    )  # fmt: skip


def residency(cards: int) -> ev.ResidencySampled:
    letters = "".join("G" if at % 3 else "C" for at in range(BLOCKS))
    return replace(
        made.residency(), weights=letters, gradients="C" * BLOCKS, optimizer="C" * BLOCKS,
        cards="".join(letter_of(at % cards) for at in range(BLOCKS)),
        blocks=(replace(made.residency().blocks[0], count=BLOCKS),),
    )  # fmt: skip


def training(cards: int, steps: int = 20) -> list[ev.AnyEvent]:
    events: list[ev.AnyEvent] = [
        made.hello(device=NAME), ev.PhaseChanged(phase="loading"), planned(cards),
        ev.PhaseChanged(phase="training"),
    ]  # fmt: skip
    for number in range(1, steps + 1):
        events += [
            made.step(number), memory(number, cards), traffic(number, cards), residency(cards),
            made.moves(number), ev.Heartbeat(phase="training", step=number),
        ]  # fmt: skip
    return made.stamped(events)


def lanes(number: int, cards: int) -> StepLanes:
    """A step of one second in which the cards compute in turn, and the last one longest."""
    found = [Interval("cpu", "update", "layers.0", 0.0, 0.3)]
    each_s = 0.9 / BLOCKS
    for at in range(BLOCKS):
        card, start = at % cards, 0.02 + at * each_s
        length = each_s * (2 if card == cards - 1 else 1.2)
        name = f"layers.{at}"
        found += [
            Interval("h2d", "weights", name, start - 0.01, 0.008, card=card),
            Interval("gpu", "forward" if at < 12 else "backward", name, start, length, card=card),
            Interval("d2h", "gradients", name, start + length, 0.006, card=card),
            Interval("stall", "cards", "", start, 0.004, card=card),
        ]
    return StepLanes(step=number, wall_s=made.START_S + number, length_s=1.0, intervals=found)


def write(folder: Path, cards: int, steps: int = 20, more: Sequence[ev.AnyEvent] = ()) -> Path:
    """Write a run's folder; return it."""
    made.write(folder / "events.ndjson", [*training(cards, steps), *more])
    ring = RingWriter(folder / "timeline.ring")
    for number in range(1, steps + 1):
        ring.write(lanes(number, cards))
    ring.close()
    return folder
