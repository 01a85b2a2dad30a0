"""Programs of several ranks, each a process that is joined over gloo."""

from __future__ import annotations

import contextlib
import datetime
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import distributed

from fluxtrain.config.schema import load_config
from fluxtrain.errors import FluxTrainError
from fluxtrain.train.checkpoint.recovery import locate, truly_told
from fluxtrain.train.ranks import train_as_rank
from tests.engine import forked


def together(world: int, program: Callable[..., Any], folder: Path, *arguments: Any) -> list[Any]:
    """What `program(*arguments)` returns in each of `world` ranks."""
    folder.mkdir(parents=True, exist_ok=True)
    given = (world, program, folder, arguments)
    with contextlib.ExitStack() as opened:
        every = [opened.enter_context(forked.running(_rank, r, *given)) for r in range(world)]
        for process in every:
            process.join(forked.LIMIT_S)
    failed = [file.read_text() for file in sorted(folder.glob("failed-*"))]
    assert not failed, "\n".join(failed)
    assert [process.exitcode for process in every] == [0] * world
    return [torch.load(folder / f"found-{r}", weights_only=False) for r in range(world)]


def join(rank: int, world: int, meeting: Path) -> None:
    """Become one rank of a group, as torchrun's children do."""
    distributed.init_process_group(
        "gloo",
        init_method=f"file://{meeting}",
        rank=rank,
        world_size=world,
        timeout=datetime.timedelta(seconds=120),
    )


def _rank(
    rank: int, world: int, program: Callable[..., Any], folder: Path, arguments: tuple[Any, ...]
) -> None:
    torch.set_num_threads(1)
    try:
        join(rank, world, folder / "meeting")
        found = program(*arguments)
        distributed.destroy_process_group()
    except BaseException:
        (folder / f"failed-{rank}").write_text(traceback.format_exc())
        raise
    torch.save(found, folder / f"found-{rank}")


def train(config: Path, run_dir: Path, overrides: list[str], resume: str | None = None) -> str:
    """`fluxtrain train` in one rank; its exit code, and why it failed."""
    settings = load_config(config, overrides)
    try:
        train_as_rank(settings, lambda: locate(resume, run_dir, settings), truly_told)
    except FluxTrainError as error:
        return f"{error.exit_code}: {error}"
    return "0"
