"""MLflow, by the client of its own library; it holds no global run, which the user may have."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fluxtrain.train.observe.trackers.tracker import TrackedRun

MOST_PARAMETERS = 100  # in one request, by MLflow's own limit
LONGEST_VALUE = 500  # characters, within the limits of all its stores


class MLflow:
    """Logs to the server or the folder that MLFLOW_TRACKING_URI names, else MLflow's default."""

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
        import time

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
