"""Feeds a tracker from a thread of its own, so that the training never waits for it.

Events go into a queue that never blocks. When it is full, because the tracker is slow or hangs, new
events are dropped, counted and told. A tracker that fails again and again is given up, with the
reason.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import replace

import msgspec

from fluxtrain.events.events import Event, MemorySampled, SampleGenerated
from fluxtrain.events.run_folder.run_dir import RunDir
from fluxtrain.files.atomic import read_json
from fluxtrain.train.observe.trackers.tracker import TrackedRun, Tracker
from fluxtrain.train.observe.trackers.values import memory_of, values_of
from fluxtrain.units import count_text, duration_text

QUEUE_LIMIT = 4096  # events; at a step a second, more than an hour
MOST_FAILURES = 3  # in a row, until a tracker is given up
FOLDER = "trackers"
THREAD = "tracker-"  # begins the names of the threads, which `output.leave` looks for


class TrackerFeed:
    """One tracker of a run, from the first event that it is given to `close`."""

    def __init__(
        self,
        name: str,
        make: Callable[[], Tracker],
        run: TrackedRun,
        warn: Callable[[str], None],
        limit: int = QUEUE_LIMIT,
    ) -> None:
        """`make` and all calls of the tracker happen in the thread; `warn` may be called there."""
        self.name = name
        self._make, self._run, self._warn = make, run, warn
        self._events: queue.Queue[Event | None] = queue.Queue(limit)
        self._failed_run, self._ended_s = False, 0.0
        self._memory: dict[str, float] = {}
        self._samples: list[tuple[str, str]] = []
        self._failures = 0
        self._given_up = False
        self.dropped = 0  # events that found the queue full
        self.lost = 0  # that the tracker raised for
        self._thread = threading.Thread(target=self._work, name=f"{THREAD}{name}", daemon=True)
        self._thread.start()

    def put(self, event: Event) -> None:
        """Queue an event, or drop it where the queue is full. Never blocks, never raises."""
        if isinstance(event, MemorySampled):
            self._memory = memory_of(event)  # the latest goes along with the next step
            return
        if self._given_up or (values_of(event) is None and not isinstance(event, SampleGenerated)):
            return
        try:
            self._events.put_nowait(event)
        except queue.Full:
            self.dropped += 1
            if self.dropped == 1:
                self._warn(
                    f"{self.name} does not keep up: {count_text(self._events.maxsize)} reports "
                    "wait for it, and further ones are dropped; the training goes on"
                )

    def end(self, *, failed: bool) -> None:
        """Ask the tracker to end its run once it has what is queued."""
        self._failed_run, self._ended_s = failed, time.monotonic()
        while True:
            try:
                self._events.put_nowait(None)
                return
            except queue.Full:  # it hangs: the oldest report gives way to the end
                with contextlib.suppress(queue.Empty):
                    self._events.get_nowait()
                    self.dropped += 1

    def wait(self, until_s: float) -> None:
        """Wait for the end until a time of `time.monotonic`; say what did not arrive."""
        self._thread.join(max(0.0, until_s - time.monotonic()))
        if self._thread.is_alive():
            waited = duration_text(time.monotonic() - self._ended_s)
            left = max(0, self._events.qsize() - 1)  # without the end
            self._warn(
                f"{self.name} did not end within {waited}: about {left} reports did not reach it"
            )
        missing = self.dropped + self.lost
        if missing:
            self._warn(f"{missing} reports are missing in {self.name}: the journal has them all")
        self._warn = lambda _: None  # the run is told of nothing any more

    # -- in the thread -----------------------------------------------------------------------------

    def _work(self) -> None:
        tracker = self._started()
        while (event := self._events.get()) is not None:
            if tracker is not None and not self._given_up:
                self._tell(tracker, event)
        if tracker is not None:
            self._carefully(lambda: tracker.finish(failed=self._failed_run), "ending its run")

    def _started(self) -> Tracker | None:
        """Start the tracker with the id of an earlier process; None: it cannot be started."""
        file = self._run.folder / FOLDER / f"{self.name}.json"
        known = (read_json(file) or {}).get("id")
        try:
            tracker = self._make()
            run = replace(self._run, known_id=known if isinstance(known, str) else None)
            found = tracker.start(run)
            if found != known:
                file.parent.mkdir(parents=True, exist_ok=True)
                RunDir(self._run.folder).write_json(file, {"id": found})
        except BaseException as error:  # noqa: BLE001 - a tracker's trouble is not the run's
            self._give_up(f"it could not be started ({_words(error)})")
            return None
        return tracker

    def _tell(self, tracker: Tracker, event: Event) -> None:
        if isinstance(event, SampleGenerated):
            self._samples = [] if event.number == 1 else self._samples
            self._samples.append((event.prompt, event.text))
            if event.number == event.count:
                self._carefully(lambda: tracker.write(event.step, self._samples), "a report")
            return
        found = values_of(event)
        assert found is not None, "put takes no other events"
        step, values = found
        if "train/loss" in values:
            values |= self._memory
        self._carefully(lambda: tracker.log(step, values), "a report")

    def _carefully(self, act: Callable[[], None], what: str) -> None:
        try:
            act()
        except BaseException as error:  # noqa: BLE001 - as above
            self.lost += 1
            self._failures += 1
            if self._failures == 1:
                self._warn(f"{self.name} refused {what} ({_words(error)}); the training goes on")
            if self._failures >= MOST_FAILURES:
                self._give_up(f"it failed {self._failures} times in a row ({_words(error)})")
        else:
            self._failures = 0

    def _give_up(self, why: str) -> None:
        self._given_up = True
        self._warn(f"{self.name} gets no reports of this run: {why}; the training goes on")


def _words(error: BaseException) -> str:
    first = (str(error).strip().splitlines() or [""])[0]
    return f"{type(error).__name__}: {first}"[:200] if first else type(error).__name__


def config_of(tree: dict[str, object]) -> dict[str, object]:
    """Return a configuration as trackers show it: `section.key` and plain values."""
    return {
        f"{section}.{key}": value
        for section, settings in tree.items()
        if isinstance(settings, dict)
        for key, value in msgspec.to_builtins(settings).items()
    }
