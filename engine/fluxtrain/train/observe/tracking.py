"""Report a run to trackers, each in a thread of its own, so that the training never waits for one.

Events go into a queue that never blocks. When it is full, because the tracker is slow or hangs, new
events are dropped, counted and told. A tracker that fails again and again is given up, with the
reason.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import queue
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol
from uuid import uuid4

import numpy as np

from fluxtrain.config.schema import RunConfig
from fluxtrain.config.section import TrackerName, TrackerSettings
from fluxtrain.errors import BadInput
from fluxtrain.events.events import Event, MemorySampled, SampleGenerated
from fluxtrain.events.run_folder.run_dir import RunDir
from fluxtrain.events.values import memory_of, values_of
from fluxtrain.files.atomic import read_json
from fluxtrain.units import count_text, duration_text

MOST_PARAMETERS = 100  # in one request, by MLflow's own limit
LONGEST_VALUE = 500  # characters, within the limits of all MLflow's stores
FLUSH_S = 5  # TensorBoard's files


@dataclass(frozen=True, kw_only=True)
class TrackedRun:
    """A run as trackers show it."""

    project: str
    name: str
    folder: Path  # the run directory
    config: Mapping[str, Any] = field(default_factory=dict)  # section.key -> value
    first_step: int = 0  # > 0 after a resume: steps already done
    known_id: str | None = None  # what `start` returned in an earlier process of this run
    offline: bool = False


class Tracker(Protocol):
    """One tracker's run. All calls come from one thread; each may raise, and may take its time."""

    def start(self, run: TrackedRun) -> str:
        """Begin a run, or continue the one of `run.known_id`; return the id to continue it by."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Add values after a step."""

    def write(self, step: int, samples: Sequence[tuple[str, str]]) -> None:
        """Write prompts with their answers after a step."""

    def draw(self, step: int, pictures: Sequence[tuple[str, Path]]) -> None:
        """Show prompts with the PNG files that were made for them after a step."""

    def finish(self, *, failed: bool) -> None:
        """End the run, with everything that was added."""


class TensorBoard:
    """torch's own writer: files in RUN/tensorboard, which `tensorboard --logdir RUN` shows."""

    def start(self, run: TrackedRun) -> str:
        """Open the files; a resumed run hides everything after its first step."""
        from torch.utils.tensorboard import SummaryWriter

        folder = str(run.folder / "tensorboard")
        purge = run.first_step + 1 if run.first_step else None
        self._writer: Any = SummaryWriter(folder, purge_step=purge, flush_secs=FLUSH_S)
        if not run.first_step:
            config = json.dumps(dict(run.config), indent=2, default=str)
            self._writer.add_text("config", "    " + config.replace("\n", "\n    "), 0)
        return folder

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Add scalars."""
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def write(self, step: int, samples: Sequence[tuple[str, str]]) -> None:
        """Add a text for each prompt."""
        for number, (prompt, text) in enumerate(samples, 1):
            self._writer.add_text(f"samples/{number}", f"**{prompt}**\n\n{text}", step)

    def draw(self, step: int, pictures: Sequence[tuple[str, Path]]) -> None:
        """Add a picture for each prompt; TensorBoard's have no captions."""
        from PIL import Image

        for number, (_, path) in enumerate(pictures, 1):
            with Image.open(path) as picture:
                pixels = np.asarray(picture.convert("RGB"))
            self._writer.add_image(f"samples/{number}", pixels, step, dataformats="HWC")

    def finish(self, *, failed: bool) -> None:
        """Write the remaining data."""
        self._writer.close()


class WeightsAndBiases:
    """Logs to a wandb run with the run's id; wandb keeps the steps that it already has."""

    def start(self, run: TrackedRun) -> str:
        """Open or continue the run; WANDB_MODE and the other variables of wandb count."""
        import wandb

        name = run.known_id or uuid4().hex[:12]
        self._wandb: Any = wandb
        settings = wandb.Settings(console="off", silent=True)
        wandb.setup(settings=settings)  # before init, which would ask for a key on the terminal
        self._run: Any = wandb.init(
            project=run.project,
            name=run.name,
            id=name,
            resume="allow",
            dir=str(run.folder),
            config=dict(run.config),
            mode="offline" if run.offline else None,
            settings=settings,
        )
        return name

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Add values."""
        self._run.log(dict(values), step=step)

    def write(self, step: int, samples: Sequence[tuple[str, str]]) -> None:
        """Add a table of the prompts and answers."""
        rows = [[step, prompt, text] for prompt, text in samples]
        table = self._wandb.Table(columns=["step", "prompt", "answer"], data=rows)
        self._run.log({"samples": table}, step=step)

    def draw(self, step: int, pictures: Sequence[tuple[str, Path]]) -> None:
        """Add a picture for each prompt."""
        shown = [self._wandb.Image(str(path), caption=prompt) for prompt, path in pictures]
        self._run.log({"samples": shown}, step=step)

    def finish(self, *, failed: bool) -> None:
        """Upload the remaining data."""
        self._run.finish(exit_code=int(failed))


class MLflow:
    """Logs to the server or the folder that MLFLOW_TRACKING_URI names, else MLflow's default.

    It uses a client and no global run, which the user may have.
    """

    def start(self, run: TrackedRun) -> str:
        """Begin a run of the experiment, or continue the earlier one."""
        from mlflow.entities import Metric, Param
        from mlflow.tracking import MlflowClient

        self._metric: Any = Metric
        self._client: Any = MlflowClient()
        if run.known_id is not None:
            self._client.update_run(run.known_id, status="RUNNING")
            self._id = run.known_id
            return self._id
        experiment = self._client.get_experiment_by_name(run.project)
        found = experiment.experiment_id if experiment else None
        found = found or self._client.create_experiment(run.project)
        self._id = str(self._client.create_run(found, run_name=run.name).info.run_id)
        texts = [Param(key, str(value)[:LONGEST_VALUE]) for key, value in run.config.items()]
        for first in range(0, len(texts), MOST_PARAMETERS):
            self._client.log_batch(self._id, params=texts[first : first + MOST_PARAMETERS])
        return self._id

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Add metrics, in one request."""
        now_ms = int(time.time() * 1000)
        metrics = [self._metric(name, value, now_ms, step) for name, value in values.items()]
        self._client.log_batch(self._id, metrics=metrics)

    def write(self, step: int, samples: Sequence[tuple[str, str]]) -> None:
        """Add a page of the prompts and answers."""
        page = "\n\n".join(f"**{prompt}**\n\n{text}" for prompt, text in samples)
        self._client.log_text(self._id, page, f"samples/step-{step:08d}.md")

    def draw(self, step: int, pictures: Sequence[tuple[str, Path]]) -> None:
        """Add the files, and a page with their prompts."""
        for _, path in pictures:
            self._client.log_artifact(self._id, str(path), "samples")
        self.write(step, [(prompt, path.name) for prompt, path in pictures])

    def finish(self, *, failed: bool) -> None:
        """End the run."""
        self._client.set_terminated(self._id, "FAILED" if failed else "FINISHED")


class Trackio:
    """Logs to a trackio run with the run's name, by which trackio knows runs."""

    def start(self, run: TrackedRun) -> str:
        """Open or continue the run."""
        import trackio

        _be_silent()
        name = run.known_id or f"{run.name}-{uuid4().hex[:6]}"
        self._picture: Any = trackio.Image
        self._run: Any = trackio.init(
            project=run.project,
            name=name,
            config=dict(run.config),
            resume="allow",
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )
        return name

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Add values."""
        self._run.log(dict(values), step=step)

    def write(self, step: int, samples: Sequence[tuple[str, str]]) -> None:
        """Add a text for each prompt."""
        texts = {f"samples/{n}": f"{p}\n\n{text}" for n, (p, text) in enumerate(samples, 1)}
        self._run.log(texts, step=step)

    def draw(self, step: int, pictures: Sequence[tuple[str, Path]]) -> None:
        """Add a picture for each prompt."""
        shown = {
            f"samples/{number}": self._picture(str(path), caption=prompt)
            for number, (prompt, path) in enumerate(pictures, 1)
        }
        self._run.log(shown, step=step)

    def finish(self, *, failed: bool) -> None:
        """Write the remaining data."""
        self._run.finish()


def _be_silent() -> None:
    """Keep trackio's own lines off the standard output, where programs read events."""
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] == "trackio":
            vars(module)["print"] = lambda *_, **__: None


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
        """Start the thread; `make` and all calls of the tracker happen in it, and `warn` may be
        called there."""
        self.name = name
        self._make, self._run, self._warn = make, run, warn
        self._events: queue.Queue[Event | None] = queue.Queue(limit)
        self._failed_run, self._ended_s = False, 0.0
        self._memory: dict[str, float] = {}
        self._samples: list[tuple[str, Any]] = []  # answers, or paths of pictures
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
        """Ask the tracker to end its run once it has the queued data."""
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
            made = self._run.folder / event.path if event.path else event.text
            self._samples.append((event.prompt, made))
            if event.number == event.count:
                show = tracker.draw if event.path else tracker.write
                self._carefully(lambda: show(event.step, self._samples), "a report")
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
