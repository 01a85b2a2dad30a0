"""Runs made of the real event classes, for what a recorded run cannot show (faults, extremes)."""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import replace

from fluxtrain.events import events as ev
from fluxtrain.events.trace.lanes import Interval, StepLanes
from fluxtrain.events.trace.ring import RingWriter
from fluxtui.sources.journal import JournalSource
from fluxtui.sources.source import EventBatch
from fluxtui.state.status import Process

GIB = 1 << 30
START_S = 1_700_000_000.0
BLOCKS = 8


def hello(**changes: object) -> ev.Hello:
    facts: dict[str, Any] = {
        "run_id": "20261121-031500-demo", "run_dir": "runs/20261121-031500-demo", "pid": 4242,
        "pid_start_s": START_S - 1, "version": "0.1.0", "model": "llama-demo", "method": "full",
        "dtype": "bf16", "device": "cpu", "machine": "2 cores, 8 GiB", "blocks": BLOCKS,
        "parameters": 4_210_000, "trained_parameters": 4_210_000, "total_steps": 200,
    }  # fmt: skip
    return ev.Hello(**(facts | changes))


def planned() -> ev.Planned:
    return ev.Planned(
        offload="weights", batch_rows=16, chunk_rows=4, accumulation=1, sequence_length=256,
        resident_blocks=2, slots=2, device_bytes=int(0.62 * GIB), device_budget_bytes=GIB,
        host_bytes=2 * GIB,
        choices=(
            ev.ChoiceMade(
                name="train.batch_rows", value="16",
                because="16 rows of 256 tokens are 4096 tokens a step, the smallest batch at which "
                "the update costs less than a tenth of the step",
            ),
            ev.ChoiceMade(
                name="placement.offload", value="weights",
                because="weights and optimizer need 50 MiB and the device budget is 1 GiB",
            ),
        ),
    )  # fmt: skip


def step(number: int, total: int = 200, step_s: float = 0.9) -> ev.StepFinished:
    wobble = 0.12 * math.sin(number * 1.7) + 0.06 * math.sin(number * 0.31)
    loss = 3.1 + 5.2 * math.exp(-number / 40) + wobble
    return ev.StepFinished(
        step=number, total_steps=total, epoch=number / total, loss=loss,
        learning_rate=3e-4 * min(1.0, number / 20), grad_norm=0.8 + 2 * math.exp(-number / 30),
        tokens=4096, total_tokens=4096 * number, step_s=step_s, tokens_per_s=4096 / step_s,
        phases_s={"data": 0.01 * step_s, "forward": 0.3 * step_s, "backward": 0.55 * step_s,
                  "optimizer": 0.1 * step_s, "other": 0.04 * step_s},
        stalls_s={"weights": 0.02 * step_s, "update": 0.01 * step_s, "gradients": 0.0},
        eta_s=(total - number) * step_s, eta_spread_s=(total - number) * step_s * 0.04,
    )  # fmt: skip


def memory(number: int = 0) -> ev.MemorySampled:
    mib = 1 << 20
    by = {
        "weights": 96 * mib, "gradients": 48 * mib, "optimizer": 0,
        "activations": (260 + 8 * (number % 5)) * mib, "workspace": 64 * mib, "cache": 24 * mib,
    }  # fmt: skip
    return ev.MemorySampled(
        device_total_bytes=None, device_used_bytes=sum(by.values()),
        device_peak_bytes=int(0.61 * GIB), device_budget_bytes=GIB, device_by=by,
        host_rss_bytes=int(1.4 * GIB), host_peak_bytes=int(1.6 * GIB),
        host_arena_bytes=60 * mib, host_pinned_bytes=0, host_limit_bytes=8 * GIB,
    )  # fmt: skip


def traffic(number: int) -> ev.TrafficSampled:
    down, up = 1.9e9 + 4e8 * math.sin(number), 0.9e9 + 3e8 * math.cos(number * 1.3)
    return ev.TrafficSampled(
        h2d_bytes=int(number * 1.9e9), d2h_bytes=int(number * 9e8), disk_read_bytes=0,
        disk_written_bytes=0, window_s=1.0, h2d_bytes_per_s=down, d2h_bytes_per_s=up,
        disk_read_bytes_per_s=0.0, disk_written_bytes_per_s=0.0,
    )  # fmt: skip


def residency(number: int = 0) -> ev.ResidencySampled:
    weights = ["G", "G"] + ["C"] * (BLOCKS - 2)
    weights[2 + number % (BLOCKS - 2)] = ">"
    return ev.ResidencySampled(
        weights="".join(weights), gradients="G" + "C" * (BLOCKS - 1), optimizer="C" * BLOCKS,
        weights_bytes=8_400_000, gradients_bytes=8_400_000, optimizer_bytes=42_000_000,
        blocks=(
            ev.BlockRun(
                name="layers.{}", first=0, count=BLOCKS, weights_bytes=1_050_000,
                gradients_bytes=1_050_000, optimizer_bytes=5_250_000,
            ),
        ),
    )  # fmt: skip


def moves(number: int) -> ev.MovesMade:
    made = tuple(
        ev.Move(
            step=number, block=f"layers.{i}", what="weights" if i % 2 else "gradients",
            bytes=1_050_000, direction="C>G" if i % 2 else "G>C", duration_s=0.0004,
            cause="prefetch" if i % 2 else "gradient",
        )
        for i in range(BLOCKS)
    )  # fmt: skip
    return ev.MovesMade(moves=made, total=number * 24)


def stamped(events: Iterable[ev.AnyEvent], first_s: float = START_S, gap_s: float = 0.1) -> list:
    """The events as an emitter would stamp them, `gap_s` apart."""
    return [
        replace(event, seq=i + 1, t_s=i * gap_s, wall_s=first_s + i * gap_s)
        for i, event in enumerate(events)
    ]


def training(steps: int = 80, total: int = 200) -> list[ev.AnyEvent]:
    """A run in the middle of its training."""
    events: list[ev.AnyEvent] = [
        hello(total_steps=total), ev.PhaseChanged(phase="loading"), planned(),
        ev.PhaseChanged(phase="training"),
    ]  # fmt: skip
    for number in range(1, steps + 1):
        events += [step(number, total), memory(number), traffic(number), residency(number),
                   moves(number), ev.Heartbeat(phase="training", step=number)]  # fmt: skip
        if number % 40 == 0:
            loss = 3.2 + 5.2 * math.exp(-number / 40)
            events.append(ev.EvaluationFinished(step=number, loss=loss, count=8192, seconds=1.2))
            events.append(
                ev.CheckpointWritten(step=number, path="checkpoints/x", bytes=60 << 20, seconds=0.3)
            )
    advice = ev.AdviceGiven(
        text="the update waits 12% of the step for host memory: a batch of 32 rows hides it",
        gain="+9% tokens a second", how="train.batch_rows=32",
    )  # fmt: skip
    return stamped([*events, advice])


def finished() -> list[ev.AnyEvent]:
    done = ev.Done(
        exit_code=0, step=200, seconds=183.0, loss=3.12, evaluation_loss=3.2, model_path="model"
    )
    return [*training(200), *stamped([done], START_S + 500)]


def failed() -> list[ev.AnyEvent]:
    error = ev.Failed(
        exit_code=4, kind="Diverged",
        message="the loss is nan at step 81: lower train.learning_rate (now 3e-4)",
    )  # fmt: skip
    done = ev.Done(
        exit_code=4, step=80, seconds=75.0, loss=None, evaluation_loss=None, model_path=None
    )
    return [*training(80), *stamped([error, done], START_S + 500)]


def write(path: Path, events: Iterable[ev.AnyEvent]) -> Path:
    """The events as a journal; one that begins with what is there goes on, as a trainer's does."""
    path.parent.mkdir(parents=True, exist_ok=True)
    whole = b"".join(msgspec.json.encode(event) + b"\n" for event in events)
    there = path.read_bytes() if path.exists() else b""
    goes_on = whole.startswith(there)
    with path.open("ab" if goes_on else "wb") as journal:
        journal.write(whole[len(there) :] if goes_on else whole)
    return path


def lanes(number: int) -> StepLanes:
    """A step of 900 ms whose forward waits for updates and whose backward for a copy."""
    found = [Interval("host", "data", "", 0.0, 0.002)]
    for i in range(BLOCKS):
        name, start = f"layers.{i}", 0.03 * i + 0.02
        found += [
            Interval("cpu", "update", name, start - 0.02, 0.026, began_before=i == 0),
            Interval("stall", "weights", "", start, 0.008),
            Interval("h2d", "weights", name, start + 0.004, 0.004),
            Interval("gpu", "forward", name, start + 0.008, 0.022),
        ]
    found.append(Interval("gpu", "head", "lm_head", 0.26, 0.08))
    for i in reversed(range(BLOCKS)):
        name, start = f"layers.{i}", 0.34 + 0.065 * (BLOCKS - 1 - i)
        found += [
            Interval("h2d", "weights", name, start - 0.03, 0.004),
            Interval("gpu", "backward", name, start, 0.055),
            Interval("gpu", "gradients", name, start + 0.055, 0.01),
            Interval("d2h", "gradients", name, start + 0.06, 0.012),
        ]
    return StepLanes(step=number, wall_s=START_S + number, length_s=0.9, intervals=found)


def write_ring(path: Path, steps: Iterable[int]) -> Path:
    """The lanes of these steps as a ring."""
    ring = RingWriter(path)
    for number in steps:
        ring.write(lanes(number))
    ring.close()
    return path


class Alive(JournalSource):
    """A run whose process is what the test says, and which is never quiet: the test may be slow."""

    process: Process = "alive"
    _last: ev.AnyEvent | None = None

    def _look_after_the_process(self) -> None:
        self._process = self.process

    def poll(self) -> EventBatch:
        batch = super().poll()
        self._last = batch.events[-1] if batch.events else self._last
        if batch.events or self._last is None:
            return batch
        beat = ev.Heartbeat(phase="training", step=0, wall_s=self._last.wall_s)
        return EventBatch([beat], batch.link, batch.restarted, batch.more)
