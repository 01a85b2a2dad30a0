"""Weights & Biases, by its own library."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any
from uuid import uuid4

from fluxtrain.train.observe.trackers.tracker import TrackedRun


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
