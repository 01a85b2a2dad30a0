"""Runs of the trainer in this process, and what their journals tell."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from fluxtrain.config.schema import load_config
from fluxtrain.data.prepare import PreparedData
from fluxtrain.events import events as ev
from fluxtrain.events.journal import read_events
from fluxtrain.methods.text_task import TextTask
from fluxtrain.train.checkpoint.recovery import locate
from fluxtrain.train.inputs import Inputs
from fluxtrain.train.run import train

MakeConfig = Callable[..., Path]


def run(
    config: Path,
    run_dir: Path,
    *overrides: str,
    resume: str | None = None,
    disk_wait_s: float = 0.0,
) -> list[Any]:
    """Train; the journal's events."""
    settings = load_config(config, list(overrides))
    train(settings, locate(resume, run_dir, settings), disk_wait_s=disk_wait_s)
    return list(read_events(run_dir / "events.ndjson"))


def of(kind: type[Any], events: list[Any]) -> list[Any]:
    return [event for event in events if isinstance(event, kind)]


def told(run_dir: Path, kind: type[Any]) -> list[Any]:
    """The events of a kind in a run's journal."""
    return of(kind, list(read_events(run_dir / "events.ndjson")))


def text_data(inputs: Inputs) -> PreparedData:
    assert isinstance(inputs.task, TextTask)
    return inputs.task.data


def losses(events: list[Any]) -> list[float]:
    return [event.loss for event in of(ev.StepFinished, events)]


def weights(run_dir: Path) -> dict[str, torch.Tensor]:
    """The saved model or adapter."""
    (path,) = (run_dir / "model").glob("*model.safetensors")
    return load_file(path)
