"""Opens the trackers that a configuration names, and closes them with the run."""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from fluxtrain.config.schema import RunConfig
from fluxtrain.config.tracker_settings import TrackerName, TrackerSettings
from fluxtrain.errors import BadInput
from fluxtrain.events.events import Event
from fluxtrain.train.observe.trackers.feed import TrackerFeed, config_of
from fluxtrain.train.observe.trackers.mlflow import MLflow
from fluxtrain.train.observe.trackers.tensorboard import TensorBoard
from fluxtrain.train.observe.trackers.tracker import TrackedRun, Tracker
from fluxtrain.train.observe.trackers.trackio import Trackio
from fluxtrain.train.observe.trackers.wandb import WeightsAndBiases

END_LIMIT_S = 30.0  # for all trackers together, to take what is queued and end their runs

TRACKERS: Mapping[TrackerName, Callable[[], Tracker]] = {
    "tensorboard": TensorBoard,
    "wandb": WeightsAndBiases,
    "mlflow": MLflow,
    "trackio": Trackio,
}


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
            config=_told(config),
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


def _told(config: RunConfig) -> dict[str, Any]:
    return config_of(config.model_dump(mode="json", exclude={"trackers"}))
