"""The loop of the background thread: poll, fold, and say at most a few times a second."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from fluxtrain.telemetry.ring import RingReader
from fluxtrain.telemetry.rundir import RunDir
from fluxtui.sources.machine import MachineSampler
from fluxtui.sources.source import RunSource
from fluxtui.state.link import Link
from fluxtui.state.machine import MachineSample
from fluxtui.state.run import RunState
from fluxtui.state.timeline import Timeline

MACHINE_PERIOD_S = 1.0


@dataclass(frozen=True, slots=True)
class News:
    """All that is known now; a later one replaces an earlier one."""

    source: RunSource
    state: RunState
    link: Link
    machine: MachineSample | None
    timeline: Timeline = field(default_factory=Timeline)


def follow(
    source: RunSource,
    say: Callable[[News], None],
    stop: threading.Event,
    period_s: Callable[[], float],
    sampler: MachineSampler | None,
) -> None:
    """Until `stop`: fold what `source` has and `say` the result every `period_s()` at most.

    Runs in a thread of its own; the fold is pure, so the state may be read while the next is made.
    """
    state = RunState()
    machine: MachineSample | None = None
    timeline = Timeline()
    ring = RingReader(RunDir(source.run_dir).timeline) if source.run_dir is not None else None
    said_s = sampled_s = float("-inf")
    while not stop.is_set():
        batch = source.poll()
        state = (RunState() if batch.restarted else state).after_all(batch.events)
        now_s = time.monotonic()
        if sampler is not None and now_s - sampled_s >= MACHINE_PERIOD_S:
            sampled_s = now_s
            machine = sampler.sample(state.hello.pid if state.hello else None)
        if now_s - said_s >= period_s():
            said_s = now_s
            if ring is not None and ring.poll():
                timeline = Timeline(ring.exists, ring.steps)
            say(News(source, state, batch.link, machine, timeline))
        if not batch.more:
            stop.wait(period_s())
    source.close()
