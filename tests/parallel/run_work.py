"""Whole runs of the trainer on ranks, as `fluxtrain train` makes them under torchrun."""

from __future__ import annotations

import contextlib
import io
import os
from pathlib import Path
from typing import Any
from unittest.mock import patch

from torch import distributed

from fluxtrain.config.schema import load_config
from fluxtrain.errors import FluxTrainError
from fluxtrain.train.checkpoint.recovery import locate, truly_told
from fluxtrain.train.ranks import train_as_rank


def run(config: str, run_dir: str, overrides: list[str], resume: str | None = None) -> str:
    """Train as one of the ranks; return the error's text, or ""."""
    settings = load_config(Path(config), ["parallel.mode=fsdp", *overrides])
    world = str(distributed.get_world_size())
    variables = {"WORLD_SIZE": world, "RANK": str(distributed.get_rank())}
    with patch.dict(os.environ, variables), contextlib.redirect_stdout(io.StringIO()):
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
