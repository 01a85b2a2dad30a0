"""The clients of trackers: each tells one package of a run, by that package's own library."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol
from uuid import uuid4

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
        """Add prompts with their answers after a step."""

    def finish(self, *, failed: bool) -> None:
        """End the run, with everything that was added."""


class TensorBoard:
    """torch's own writer: files in RUN/tensorboard, which `tensorboard --logdir RUN` shows."""

    def start(self, run: TrackedRun) -> str:
        """Open the files; a resumed run hides what comes after its first step."""
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

    def finish(self, *, failed: bool) -> None:
        """Write what is left."""
        self._writer.close()


class WeightsAndBiases:
    """Logs to a run of its own id. Steps that wandb has already are left as they are by wandb."""

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

    def finish(self, *, failed: bool) -> None:
        """Upload what is left."""
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

    def finish(self, *, failed: bool) -> None:
        """End the run."""
        self._client.set_terminated(self._id, "FAILED" if failed else "FINISHED")


class Trackio:
    """Logs to a run of its own name, by which trackio knows runs."""

    def start(self, run: TrackedRun) -> str:
        """Open or continue the run."""
        import trackio

        _be_silent()
        name = run.known_id or f"{run.name}-{uuid4().hex[:6]}"
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

    def finish(self, *, failed: bool) -> None:
        """Write what is left."""
        self._run.finish()


def _be_silent() -> None:
    """Keep trackio's own lines off the standard output, where programs read events."""
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] == "trackio":
            vars(module)["print"] = lambda *_, **__: None
