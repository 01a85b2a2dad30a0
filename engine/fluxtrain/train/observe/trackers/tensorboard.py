"""TensorBoard, by torch's own writer: event files in the run directory, no network."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from fluxtrain.train.observe.trackers.tracker import TrackedRun

FLUSH_S = 5


class TensorBoard:
    """Writes RUN/tensorboard, which `tensorboard --logdir RUN` shows."""

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
