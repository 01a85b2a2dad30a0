"""The answers of `fluxtrain trace`."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from fluxtrain.trace.attribution import attribute, median_step, summary_lines
from fluxtrain.trace.export import VIEWER, recorded_steps, write_trace


def summarised(run: str) -> tuple[str, dict[str, Any]]:
    """Say where the time of a run's last and median step went, for people and for programs.

    Raises:
        BadInput: there is no such run, or it has no timeline.
    """
    _, steps = recorded_steps(run)
    last, median = attribute(steps[-1]), attribute(median_step(steps))
    lines = [*summary_lines(last, "last"), *summary_lines(median, f"median of {len(steps)}")]
    return "\n".join(lines), {
        "steps": len(steps), "last": asdict(last), "median": asdict(median),
    }  # fmt: skip


def exported(run: str, output: Path | None) -> tuple[str, dict[str, Any]]:
    """Write a run's last steps as a trace (by default into its folder); return what was written.

    Raises:
        BadInput: there is no such run, it has no timeline, or `output` cannot be a trace.
        NoSpace: on a full disk.
    """
    run_dir, steps = recorded_steps(run)
    path = output or run_dir.path / "trace.json.gz"
    size = write_trace(path, steps, run_dir.run_id)
    facts = {"path": str(path), "bytes": size, "steps": len(steps)}
    return f"{path}: {len(steps)} steps; open it at {VIEWER}", facts
