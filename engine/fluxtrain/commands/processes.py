"""`fluxtrain train` in several processes: start them, wait, and end with the run's own code."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

import typer

from fluxtrain.commands.output import complain
from fluxtrain.core.ranks.launch import launch
from fluxtrain.errors import EXIT_INTERRUPTED, BadInput, Interrupted, RankLost
from fluxtrain.events.trace.export import traced
from fluxtrain.plan.request import ParallelRequest
from fluxtrain.train.checkpoint.recovery import Target, truly_told


def launched() -> bool:
    """Return whether a launcher has started this process as one of several."""
    told = os.environ.get("WORLD_SIZE", "")
    return told.isdecimal() and int(told) > 1


def is_follower() -> bool:
    """Return whether another process of the run keeps its records."""
    return launched() and os.environ.get("RANK") != "0"


@contextmanager
def kept(target: Target, *, trace: Path | None) -> Iterator[None]:
    """Tidy up what a run leaves in the directory of `target`, and write its trace."""
    with truly_told(target), traced(target.run_dir, trace, complain):
        yield


def words_of(
    config: Path | None,
    demo: bool,
    overrides: Sequence[str],
    json: bool,
    debug: bool,
    trace: Path | None,
    disk_wait: float,
) -> list[str]:
    """Return the options of `fluxtrain train` for one of its processes."""
    flags = {"--demo": demo, "--json": json, "--debug": debug}
    words = ["train", *([] if config is None else [str(config)])]
    words += [word for one in overrides for word in ("--set", one)]
    words += [flag for flag, is_set in flags.items() if is_set]
    words += [] if trace is None else ["--trace", str(trace)]
    return [*words, "--disk-wait", str(disk_wait)]


def train_in_processes(parallel: ParallelRequest, target: Target, words: list[str]) -> NoReturn:
    """Train in the directory of `target` with as many processes as `parallel` says, each of which
    runs `fluxtrain WORDS`; end this one as the run ended.

    Raises BadInput where several cards are asked for too; Interrupted after Ctrl-C; RankLost where
    the run left no record.
    """
    if parallel.cards not in ("auto", 1):
        raise BadInput(
            f"parallel.cards is {parallel.cards} and parallel.processes is {parallel.processes}: "
            "each process computes on one card, so leave one of the two out"
        )
    run_dir = target.run_dir
    if target.checkpoint is None:
        words = [*words, "--run-dir", str(run_dir.path), "--resume", "auto"]
    else:
        words = [*words, "--resume", str(target.checkpoint)]

    def first_process() -> int | None:
        user = run_dir.user()
        return user.pid if user is not None and user.is_alive() else None

    with truly_told(target):
        status = launch(words, parallel.processes, parallel.restarts, first_process)
    code = run_dir.summary().exit_code if run_dir.path.exists() else None
    if status and not code:
        raise RankLost(
            f"a process of the run ended without a word (torchrun: {status}): out of memory, or "
            f"killed; to go on: fluxtrain train --resume {run_dir.path}"
        )
    if code == EXIT_INTERRUPTED:
        raise Interrupted("all processes of the run have ended", code)
    raise typer.Exit(code or 0)
