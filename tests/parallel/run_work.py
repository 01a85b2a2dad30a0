"""Whole runs of the trainer on ranks, as `fluxtrain train` makes them under torchrun."""

from __future__ import annotations

import contextlib
import io
import os
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import distributed

from fluxtrain.commands.dry_run import dry_run
from fluxtrain.config.schema import load_config
from fluxtrain.errors import FluxTrainError
from fluxtrain.events.answers.answers import DryRunAnswer
from fluxtrain.train import sharded_run
from fluxtrain.train.checkpoint.recovery import locate, truly_told
from fluxtrain.train.loop import TrainingLoop
from fluxtrain.train.placing.sharded import plan_sharded
from fluxtrain.train.ranks import train_as_rank


def run(config: str, run_dir: str, overrides: list[str], resume: str | None = None) -> str:
    """Train as one of the ranks; return the error's text, or ""."""
    settings = load_config(Path(config), ["parallel.mode=fsdp", *overrides])
    with _launched(), contextlib.redirect_stdout(io.StringIO()):
        try:
            train_as_rank(
                settings, lambda: locate(resume, Path(run_dir), settings), truly_told, json=False
            )
        except FluxTrainError as error:
            return f"{type(error).__name__}: {error}"
    return ""


def run_otherwise(config: str, run_dir: str, others: list[Any]) -> str:
    """Train with overrides that differ between the ranks."""
    return run(config, run_dir, others[distributed.get_rank()])


def run_without_memory(config: str, run_dir: str) -> str:
    """Train, and run out of device memory in the first step."""
    error = torch.OutOfMemoryError("CUDA out of memory")
    with patch.object(TrainingLoop, "_compute", side_effect=error):
        return run(config, run_dir, [])


def run_with_less_room_on_the_last(config: str, run_dir: str) -> str:
    """Train with automatic rows, of which one fits the card of the last rank."""
    is_last = distributed.get_rank() == distributed.get_world_size() - 1

    def plan(*given: Any) -> Any:
        changed = list(given)
        if is_last:
            changed[-3] = 1  # of a rank, before those of the data and the constants
        return plan_sharded(*changed)

    with patch.object(sharded_run, "plan_sharded", plan):
        return run(config, run_dir, ["train.batch_rows=auto"])


def tried(config: str) -> DryRunAnswer | None:
    """Make a dry run as one of the ranks."""
    settings = load_config(Path(config), ["parallel.mode=fsdp"])
    with _launched(), contextlib.redirect_stderr(io.StringIO()):
        return dry_run(settings)


def _launched() -> Any:
    """Set what torchrun sets."""
    world, rank = str(distributed.get_world_size()), str(distributed.get_rank())
    return patch.dict(os.environ, {"WORLD_SIZE": world, "RANK": rank})
