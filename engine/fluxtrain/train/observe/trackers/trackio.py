"""trackio, by its own library: a local database that `trackio show` draws."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any
from uuid import uuid4

from fluxtrain.train.observe.trackers.tracker import TrackedRun


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
