"""`fluxtrain verify-resume`: prove that a resumed run is here the one that never stopped.

One process trains some steps and saves in the middle; another one resumes from there. Losses, norms
and learning rates of the steps, and everything in the two last checkpoints, must be the same bits.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from fluxtrain.config.schema import RunConfig, validate
from fluxtrain.errors import EXIT_BUG, BadInput, FluxTrainError
from fluxtrain.events.answers.answers import ResumeAnswer
from fluxtrain.events.events import StepFinished
from fluxtrain.events.journal import read_events
from fluxtrain.events.run_folder.run_dir import RunDir, runs_root
from fluxtrain.files.atomic import read_json
from fluxtrain.files.folders import unfinished_folder
from fluxtrain.files.parent import environment_of_child
from fluxtrain.files.terminations import terminations_told
from fluxtrain.train.checkpoint.checkpoint import Checkpoint, read_checkpoint, step_folder

_TRAIN = (sys.executable, "-P", "-m", "fluxtrain", "train")
_OWN_TIMES = ("trained_s",)  # of two runs that are otherwise the same
Start = Callable[[Sequence[str]], int]


def verify_resume(
    config: RunConfig, steps: int, report: Callable[[str], None], start: Start | None = None
) -> ResumeAnswer:
    """Train, resume and compare; nothing of it is kept. `start` runs `fluxtrain train ARGUMENTS`.

    Raises:
        BadInput: there are too few steps to save in the middle.
        FluxTrainError: a process ended otherwise than with 0; its message and its exit code.
    """
    if steps < 2:
        raise BadInput(f"--steps {steps} has no middle to save in: take 2 or more")
    started_s, run, saved = time.monotonic(), start or _process, steps // 2
    runs_root().mkdir(parents=True, exist_ok=True)
    with (
        terminations_told("the runs were compared"),
        unfinished_folder(runs_root(), ".verify-resume-") as folder,
    ):
        settings, made = folder / "run.yaml", RunDir(folder / "run")
        settings.write_text(json.dumps(_shortened(config, steps)), encoding="utf-8")
        report(f"training {steps} steps, saving after {saved}")
        _run(run, made, [str(settings), "--run-dir", str(made.path)])
        last, straight = step_folder(made.checkpoints, steps), folder / "straight" / "whole"
        straight.parent.mkdir()
        last.rename(straight)
        report(f"resuming after step {saved} in a new process")
        trust = ["--set", "model.trust_remote_code=true"] if config.model.trust_remote_code else []
        _run(run, made, ["--resume", str(step_folder(made.checkpoints, saved)), *trust])
        report("comparing")
        step, told = _first_step(made, saved)
        one, other = read_checkpoint(straight), read_checkpoint(last)
        tensor, count, values = None, 0, 0
        for name, left, right in _pairs(one, other):
            count, values = count + 1, values + left.numel()
            if tensor is None and not _equal(left, right):
                tensor = name
                told = told or f"{name} differs after step {steps}, though all losses are the same"
        if told is None and (key := _first_state(one, other)) is not None:
            told = f"the saved {key} is another one after step {steps}"
    return ResumeAnswer(
        steps=steps, saved_step=saved, tensors=count, values=values, first_step=step,
        first_tensor=tensor, difference=told, seconds=time.monotonic() - started_s,
    )  # fmt: skip


def page(found: ResumeAnswer) -> str:
    """Format the answer for people."""
    if found.equal:
        return (
            f"equal: after a resume at step {found.saved_step} of {found.steps} in a new process "
            f"all losses, and all {found.values:,} values of weights and optimizer states in "
            f"{found.tensors:,} tensors, are the same bits ({found.seconds:.0f} s)"
        )
    return f"not equal: {found.difference}"


def _first_step(run: RunDir, saved: int) -> tuple[int | None, str | None]:
    """Compare the two processes' reports of the steps after the saved one."""
    before: dict[int, StepFinished] = {}
    for event in read_events(run.journal):
        if not isinstance(event, StepFinished) or event.step <= saved:
            continue
        once = before.setdefault(event.step, event)
        for key in ("loss", "grad_norm", "learning_rate"):
            one, other = getattr(once, key), getattr(event, key)
            if repr(one) != repr(other):  # two that are NaN are the same
                name = f"the {key.replace('_', ' ')} of step {event.step}"
                return event.step, f"{name} was {one!r} and is {other!r}"
    return None, None


def _pairs(one: Checkpoint, other: Checkpoint) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Yield the tensors of both by name, a shard at a time."""
    for (shard, left), (_, right) in zip(one.load_shards(), other.load_shards(), strict=True):
        for name, tensor in left.items():
            yield f"{shard}.{name}", tensor, right[name]


def _equal(one: Tensor, other: Tensor) -> bool:
    bits = [each.contiguous().reshape(-1).view(torch.uint8) for each in (one, other)]
    return one.dtype == other.dtype and torch.equal(*bits)


def _first_state(straight: Checkpoint, resumed: Checkpoint) -> str | None:
    """Name the first part of the trainers' states that differs."""
    states: list[dict[str, Any]] = [found.trainer_state() for found in (straight, resumed)]
    for state in states:
        state["run"] = {k: v for k, v in state["run"].items() if k not in _OWN_TIMES}
    one, other = states
    return next((key for key in one.keys() | other.keys() if one.get(key) != other.get(key)), None)


def _run(start: Start, run: RunDir, arguments: list[str]) -> None:
    code = start(arguments)
    if code == 0:
        return
    told = read_json(run.error) or read_json(run.result) or {}
    words = told.get("message", "it says nothing")
    failed = FluxTrainError(f"the run that was to be resumed ended with {code}: {words}")
    failed.exit_code = code if code > 0 else EXIT_BUG
    raise failed


def _process(arguments: Sequence[str]) -> int:
    """Run `fluxtrain train ARGUMENTS` in a process that ends with this one."""
    nothing = subprocess.DEVNULL
    command = [*_TRAIN, *arguments]
    return subprocess.run(
        command, check=False, stdin=nothing, stdout=nothing, stderr=nothing,
        env=environment_of_child(),
    ).returncode  # fmt: skip


def _shortened(config: RunConfig, steps: int) -> dict[str, Any]:
    """Return the settings with `steps` steps, a checkpoint in the middle and one at the end."""
    raw = config.model_dump(mode="json")
    raw["train"] |= {
        "steps": steps, "warmup_steps": steps, "evaluate_every": "end",
        "checkpoint_every": steps // 2, "keep_checkpoints": 3, "final_model": "last",
        "early_stopping_patience": None,
    }  # fmt: skip
    raw["samples"]["prompts"], raw["trackers"]["report_to"] = [], []
    return validate(raw, "the check of a resume").model_dump(mode="json")
