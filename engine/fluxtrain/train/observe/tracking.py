"""Report a run to trackers, each in a thread of its own, so that the training never waits for one.

Events go into a queue that never blocks. When it is full, because the tracker is slow or hangs, new
events are dropped, counted and told. A tracker that fails again and again is given up, with the
reason.
"""

from __future__ import annotations

import contextlib
import importlib.util
import math
import queue
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

from fluxtrain.config.schema import RunConfig
from fluxtrain.config.tracker_settings import TrackerName, TrackerSettings
from fluxtrain.errors import BadInput
from fluxtrain.events.events import (
    EvaluationFinished,
    Event,
    MemorySampled,
    SampleGenerated,
    StepFinished,
)
from fluxtrain.events.run_folder.run_dir import RunDir
from fluxtrain.files.atomic import read_json
from fluxtrain.train.observe.tracker_clients import (
    MLflow,
    TensorBoard,
    TrackedRun,
    Tracker,
    Trackio,
    WeightsAndBiases,
)
from fluxtrain.units import count_text, duration_text

END_LIMIT_S = 30.0  # for all trackers together, to take what is queued and end their runs

TRACKERS: Mapping[TrackerName, Callable[[], Tracker]] = {
    "tensorboard": TensorBoard,
    "wandb": WeightsAndBiases,
    "mlflow": MLflow,
    "trackio": Trackio,
}
QUEUE_LIMIT = 4096  # events; at a step a second, more than an hour
MOST_FAILURES = 3  # in a row, until a tracker is given up
FOLDER = "trackers"
THREAD = "tracker-"  # begins the names of the threads, which `output.leave` looks for


def refuse_missing_trackers(settings: TrackerSettings) -> None:
    """Raise BadInput, with the command that installs it, for a tracker without its package."""
    missing = [name for name in settings.report_to if not _is_installed(name)]
    if missing:
        raise BadInput(
            f"trackers.report_to names {', '.join(missing)}, which is not installed: "
            f"pip install 'fluxtrain[{','.join(missing)}]', or leave it out"
        )


def _is_installed(name: str) -> bool:
    """Return whether a package can be imported; a folder of that name, as wandb makes, is none."""
    found = importlib.util.find_spec(name)
    return found is not None and found.origin is not None


class Trackers:
    """The trackers of one process of a run."""

    def __init__(
        self,
        config: RunConfig,
        folder: Path,
        first_step: int,
        warn: Callable[[str], None],
        limit_s: float | None = None,
    ) -> None:
        """Start a thread for each tracker of `config`; the run's directory is `folder`."""
        settings = config.trackers
        self._limit_s = END_LIMIT_S if limit_s is None else limit_s
        run = TrackedRun(
            project=settings.project,
            name=settings.name or folder.name,
            folder=folder,
            config=_shown(config),
            first_step=first_step,
            offline=settings.offline,
        )
        self.feeds = [
            TrackerFeed(name, TRACKERS[name], run, warn)
            for name in dict.fromkeys(settings.report_to)
        ]

    def put(self, event: Event) -> None:
        """Give an event to all trackers; takes microseconds."""
        for feed in self.feeds:
            feed.put(event)

    def close(self, *, failed: bool) -> None:
        """End the trackers' runs, and wait for them `limit_s` (`END_LIMIT_S`) at most."""
        until_s = time.monotonic() + self._limit_s
        for feed in self.feeds:
            feed.end(failed=failed)
        for feed in self.feeds:
            feed.wait(until_s)


def _shown(config: RunConfig) -> dict[str, object]:
    """Return a configuration as trackers show it: `section.key` and plain values."""
    return {
        f"{section}.{key}": value
        for section, settings in config.model_dump(mode="json", exclude={"trackers"}).items()
        if isinstance(settings, dict)
        for key, value in settings.items()
    }


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


def values_of(event: Event) -> tuple[int, dict[str, float]] | None:
    """Return the step and the finite numbers of an event; None: it has none to show."""
    if isinstance(event, StepFinished):
        return event.step, _finite(_of_step(event))
    if isinstance(event, EvaluationFinished):
        found = {f"eval/{name}": value for name, value in event.metrics.items()}
        found |= {"eval/loss": event.loss, "eval/seconds": event.seconds}
        if event.best_loss is not None:
            found["eval/best_loss"] = event.best_loss
        return event.step, _finite(found)
    return None


def memory_of(event: MemorySampled) -> dict[str, float]:
    """Return the memory in use, in bytes."""
    return _finite(
        {
            "memory/device_used_bytes": event.device_used_bytes,
            "memory/device_peak_bytes": event.device_peak_bytes,
            "memory/host_rss_bytes": event.host_rss_bytes,
        }
    )


def _of_step(event: StepFinished) -> dict[str, float | None]:
    values: dict[str, float | None] = {
        "train/loss": event.loss,
        "train/learning_rate": event.learning_rate,
        "train/grad_norm": event.grad_norm,
        "train/epoch": event.epoch,
        "train/total_tokens": event.total_tokens,
        "train/loss_scale": event.loss_scale,
        "speed/step_s": event.step_s,
        "speed/tokens_per_s": event.tokens_per_s,
    }
    values |= {f"phases_s/{name}": seconds for name, seconds in event.phases_s.items()}
    values |= {f"stalls_s/{name}": seconds for name, seconds in event.stalls_s.items()}
    return values


def _finite(values: Mapping[str, float | None]) -> dict[str, float]:
    return {
        name: float(value)
        for name, value in values.items()
        if value is not None and math.isfinite(value)
    }
