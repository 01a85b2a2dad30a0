"""`fluxtrain train` in several processes: start them, wait, and end with the run's own code."""

from __future__ import annotations

import asyncio
import os
import shlex
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

import typer

from fluxtrain.commands.importing import Importing
from fluxtrain.commands.options import chosen_config
from fluxtrain.commands.output import complain
from fluxtrain.config.schema import RunConfig
from fluxtrain.core.ranks.launch import launch
from fluxtrain.errors import (
    EXIT_BUG,
    EXIT_DEVICE_FAILED,
    EXIT_FINISHED,
    EXIT_INTERRUPTED,
    EXIT_NO_SPACE,
    EXIT_READ_FAILED,
    EXIT_TERMINATED,
    Interrupted,
)
from fluxtrain.events.answers.asking import EngineRefused, ask_engine
from fluxtrain.events.answers.plan import PlanAnswer
from fluxtrain.events.events import Done, Failed
from fluxtrain.events.journal import newest_events
from fluxtrain.events.run_folder.run_dir import RunDir, runs_root
from fluxtrain.events.trace.export import traced
from fluxtrain.machine.gpu import read_gpus
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


def with_planned_mode(
    chosen: RunConfig, config: Path | None, demo: bool, overrides: list[str], target: Target | None
) -> tuple[RunConfig, list[str]]:
    """Return configuration and overrides in which `parallel.mode: auto` is fsdp, where `fluxtrain
    plan` predicts that faster.

    They stay as they are for a run that is resumed, on one card, in a process that a launcher
    started, and on a machine that `fluxtrain probe` has not measured. The plan is made in another
    process, whose memory on the cards is free again.
    """
    words = named(config, demo=demo, overrides=overrides)
    resumes = target is not None and target.resumes
    if resumes or not (mode := _planned_mode(chosen, words)):
        return chosen, overrides
    overrides = [*overrides, *mode]
    return chosen_config(config, demo, overrides) or chosen, overrides


def _planned_mode(config: RunConfig, words: Sequence[str]) -> list[str]:
    if config.parallel != ParallelRequest() or config.is_sharded or launched():
        return []
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "all, of many").split(",")
    if config.placement.device == "cpu" or min(len(visible), len(read_gpus().gpus)) < 2:
        return []
    with Importing():
        from fluxtrain.measure.probe.probe import known_rates
    if not known_rates(runs_root()):
        return []
    try:
        planned = asyncio.run(ask_engine(PlanAnswer, *words))
    except EngineRefused:
        return []  # the run says by itself what is wrong
    for choice in planned.choices:
        if choice.name == "parallel.mode" and choice.value == "fsdp":
            complain(f"parallel.mode: auto is fsdp: {choice.because}")
            return [
                "parallel.mode=fsdp",
                f"parallel.processes={planned.config['parallel']['processes']}",
            ]
    return []


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
    flags = {"--json": json, "--debug": debug}
    words = ["train", *named(config, demo=demo, overrides=overrides)]
    words += [flag for flag, is_set in flags.items() if is_set]
    words += [] if trace is None else ["--trace", str(trace)]
    return [*words, "--disk-wait", str(disk_wait)]


def named(config: Path | None, *, demo: bool, overrides: Sequence[str]) -> list[str]:
    """Return the words of a command that name its configuration."""
    words = ["--demo"] * demo + ([] if config is None else [str(config)])
    return words + [word for one in overrides for word in ("--set", one)]


def try_in_processes(
    config: RunConfig, words: Sequence[str], steps: int, *, json: bool
) -> NoReturn:
    """Make a dry run of so many steps in its processes; end this one as it ended.

    Raises what `fluxtrain plan` refuses, before they start.
    """
    asyncio.run(ask_engine(PlanAnswer, *words))
    words = ["dry-run", *words, "--steps", str(steps), *["--json"] * json]
    status = launch(words, config.parallel.processes, lambda: None)
    if status in (EXIT_INTERRUPTED, EXIT_TERMINATED):
        raise Interrupted("all processes of the dry run were ended at once", status)
    raise typer.Exit(status)


def train_in_processes(config: RunConfig, target: Target, words: list[str]) -> NoReturn:
    """Train in the directory of `target` with as many processes as `config` says, each of which
    runs `fluxtrain WORDS`; end this one as the run ended.

    Raises BadInput for what a sharded model cannot have and where the directory is in use, and
    Interrupted after Ctrl-C.
    """
    run_dir, parallel = target.run_dir, config.parallel
    if config.is_sharded:
        with Importing():
            from fluxtrain.train.placing.sharded import refuse_settings
        refuse_settings(config)
    if target.checkpoint is None:
        words = [*words, "--run-dir", str(run_dir.path), "--resume", "auto"]
    else:
        words = [*words, "--resume", str(target.checkpoint)]

    def first_process() -> int | None:
        user = run_dir.user()
        return user.pid if user is not None and user.is_alive() else None

    target = replace(target, made=target.made or not run_dir.path.exists())
    way = f"; to go on: fluxtrain train --resume {shlex.quote(str(run_dir.path))}"
    with truly_told(target), run_dir.held_for_children():
        for left in reversed(range(parallel.restarts + 1)):
            began_s = time.monotonic()
            status = launch(words, parallel.processes, first_process)
            if status in (EXIT_INTERRUPTED, EXIT_TERMINATED):
                raise Interrupted(f"all processes were ended at once{way}", status)
            code, message = _end_of(run_dir, began_s, status)
            if not left or code not in (EXIT_BUG, EXIT_DEVICE_FAILED, EXIT_READ_FAILED):
                break
            complain(f"{message}; all start again, {left} times at most")
        if code == EXIT_INTERRUPTED:
            raise Interrupted("all processes of the run have ended", code)
        if message:  # again, behind torchrun's own report
            complain(f"error: {message}{way * (code in (EXIT_DEVICE_FAILED, EXIT_NO_SPACE))}")
        raise typer.Exit(code)


def _end_of(run_dir: RunDir, since_s: float, status: int) -> tuple[int, str]:
    """Return how the run ended after `since_s`: its exit code, and why where it failed. The exit
    `status` of its processes counts without a word of it in the journal, and where the first rank
    says no more than that another one has ended."""
    found = newest_events(run_dir.journal, (Done, Failed)).values()
    end = max((one for one in found if one.t_s >= since_s), key=lambda one: one.t_s, default=None)
    has_said = EXIT_BUG < status <= EXIT_READ_FAILED
    if isinstance(end, Done | Failed):
        message = end.message if isinstance(end, Failed) else ""
        left_alone = end.exit_code == EXIT_DEVICE_FAILED
        return (status if left_alone and has_said else end.exit_code), message
    if not status:
        return EXIT_FINISHED, ""
    if has_said:
        return status, f"a process of the run ended with exit code {status}: why stands above"
    return EXIT_DEVICE_FAILED, (
        "a process of the run ended without a word: out of memory, or killed"
    )
