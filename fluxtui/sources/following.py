"""The loop of the background thread: poll, fold, and report at most a few times a second."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from fluxtrain.rundir.run_dir import RunDir
from fluxtrain.trace.ring import RingReader
from fluxtui.sources.source import RunSource
from fluxtui.state.run import RunState
from fluxtui.state.status import Link
from fluxtui.state.timeline import Timeline


@dataclass(frozen=True, slots=True)
class News:
    """The present state of a run; newer news replace older ones."""

    source: RunSource
    state: RunState
    link: Link
    timeline: Timeline = field(default_factory=Timeline)


def follow(
    source: RunSource,
    say: Callable[[News], None],
    stop: threading.Event,
    period_s: Callable[[], float],
) -> None:
    """Fold events of `source` and `say` the result every `period_s()` at most, until `stop`.

    Runs in a thread of its own; the fold is pure, so the state may be read while the next is made.
    """
    state = RunState()
    timeline = Timeline()
    ring = RingReader(RunDir(source.run_dir).timeline) if source.run_dir is not None else None
    said_s, heard_s = float("-inf"), time.monotonic()
    while not stop.is_set():
        batch = source.poll()
        state = (RunState() if batch.restarted else state).after_all(batch.events)
        now_s = time.monotonic()
        heard_s = now_s if batch.events else heard_s
        if now_s - said_s >= period_s():
            said_s = now_s
            if ring is not None and ring.poll():
                timeline = Timeline(ring.exists, ring.steps)
            link = replace(batch.link, quiet_s=now_s - heard_s)
            say(News(source, state, link, timeline))
        if not batch.more:
            stop.wait(period_s())
    source.close()
