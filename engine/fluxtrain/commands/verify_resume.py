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
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from msgspec.structs import replace
from torch import Tensor

from fluxtrain.config.schema import RunConfig, validate
from fluxtrain.errors import EXIT_BUG, BadInput, FluxTrainError
from fluxtrain.events.answers.dry_run import ResumeAnswer
from fluxtrain.events.events import StepFinished
from fluxtrain.events.journal import read_events
from fluxtrain.events.run_folder.run_dir import RunDir, runs_root
from fluxtrain.files.atomic import read_json, storage_error
from fluxtrain.files.folders import unfinished_folder
from fluxtrain.files.parent import environment_of_child
from fluxtrain.files.terminations import terminations_told
from fluxtrain.train.checkpoint.checkpoint import Checkpoint, read_checkpoint, step_folder
from fluxtrain.train.checkpoint.shard_file import read_tensors

STEPS = 8
_TRAIN = (sys.executable, "-P", "-m", "fluxtrain", "train")
_OWN_TIMES = ("trained_s",)  # of two runs that are otherwise the same
Start = Callable[[Sequence[str]], int]
Report = Callable[[str], None]


def verify_resume(
    config: RunConfig, steps: int, report: Report, start: Start | None = None
) -> ResumeAnswer:
    """Train, resume and compare; nothing of it is kept. `start` runs `fluxtrain train ARGUMENTS`.

    Raises:
        BadInput: there are too few steps to save in the middle.
        FluxTrainError: a process ended otherwise than with 0; its message and its exit code.
    """
    if steps < 2:
        raise BadInput(f"--steps {steps} has no middle to save in: take 2 or more")
    started_s, run = time.monotonic(), start or _process
    with terminations_told("the runs were compared"), _folder() as folder:
        settings = folder / "run.yaml"
        settings.write_text(json.dumps(_shortened(config, steps)), encoding="utf-8")
        trust = ["--set", "model.trust_remote_code=true"] if config.model.trust_remote_code else []
        made = RunDir(folder / "run")
        report(f"training {steps} steps, saving after {steps // 2}")
        _run(run, made, [str(settings), "--run-dir", str(made.path)])
        last, straight = step_folder(made.checkpoints, steps), folder / "straight" / "whole"
        straight.parent.mkdir()
        last.rename(straight)
        report(f"resuming after step {steps // 2} in a new process")
        middle = step_folder(made.checkpoints, steps // 2)
        _run(run, made, ["--resume", str(middle), *trust])
        report("comparing")
        answer = compared(
            _curves(made, steps // 2), read_checkpoint(straight), read_checkpoint(last), steps
        )
    return replace(answer, seconds=time.monotonic() - started_s)


def page(found: ResumeAnswer) -> str:
    """Format the answer for people."""
    if found.equal:
        return (
            f"equal: after a resume at step {found.saved_step} of {found.steps} in a new process "
            f"all losses, and all {found.values:,} values of weights and optimizer states in "
            f"{found.tensors:,} tensors, are the same bits ({found.seconds:.0f} s)"
        )
    return f"not equal: {found.difference}"


def compared(
    curves: tuple[dict[int, StepFinished], dict[int, StepFinished]],
    straight: Checkpoint,
    resumed: Checkpoint,
    steps: int,
) -> ResumeAnswer:
    """Compare the steps that both made, and the two checkpoints after the last one."""
    before, after = curves
    saved = steps - len(after)
    step, words = _first_step(before, after)
    tensor, count, values = None, 0, 0
    for name, one, other in _pairs(straight, resumed):
        count += 1
        values += 0 if one is None else one.numel()
        if tensor is None and (told := _differs(one, other)) is not None:
            tensor = name
            words = words or f"{name} {told} after step {steps}, though all losses are the same"
    if words is None and (key := _first_state(straight, resumed)) is not None:
        words = f"the saved {key} is another one after step {steps}"
    return ResumeAnswer(
        steps=steps, saved_step=saved, tensors=count, values=values,
        first_step=step, first_tensor=tensor, difference=words,
    )  # fmt: skip


def _first_step(
    before: dict[int, StepFinished], after: dict[int, StepFinished]
) -> tuple[int | None, str | None]:
    for number, again in sorted(after.items()):
        once = before[number]
        for key in ("loss", "grad_norm", "learning_rate"):
            one, other = getattr(once, key), getattr(again, key)
            if repr(one) != repr(other):  # two that are NaN are the same
                name = key.replace("_", " ")
                return number, f"the {name} of step {number} was {one!r} and is {other!r}"
    return None, None


def _pairs(
    straight: Checkpoint, resumed: Checkpoint
) -> Iterator[tuple[str, Tensor | None, Tensor | None]]:
    """Yield the tensors of both by name, a shard at a time."""
    files = [dict(found.shards) for found in (straight, resumed)]
    for shard in dict.fromkeys([*files[0], *files[1]]):
        one, other = (
            read_tensors(found.path / names[shard]) if shard in names else {}
            for found, names in zip((straight, resumed), files, strict=True)
        )
        for name in dict.fromkeys([*one, *other]):
            yield f"{shard}.{name}", one.get(name), other.get(name)


def _differs(one: Tensor | None, other: Tensor | None) -> str | None:
    """Say how two tensors differ; None where they are the same bits."""
    if one is None or other is None:
        return "is in one of the two alone"
    if one.shape != other.shape or one.dtype != other.dtype:
        return "has another shape or dtype"
    bits = [each.contiguous().reshape(-1).view(torch.uint8) for each in (one, other)]
    if torch.equal(*bits):
        return None
    wrong = (bits[0] != bits[1]).view(-1, one.element_size()).any(1)
    return f"differs in {int(wrong.sum()):,} of {one.numel():,} values"


def _first_state(straight: Checkpoint, resumed: Checkpoint) -> str | None:
    """Name the first part of the trainers' states that differs."""
    states: list[dict[str, Any]] = [found.trainer_state() for found in (straight, resumed)]
    for state in states:
        state["run"] = {k: v for k, v in state["run"].items() if k not in _OWN_TIMES}
    one, other = states
    return next((key for key in one.keys() | other.keys() if one.get(key) != other.get(key)), None)


def _curves(run: RunDir, saved: int) -> tuple[dict[int, StepFinished], dict[int, StepFinished]]:
    """Return the steps after the saved one, as the first process and as the second told them."""
    found: tuple[dict[int, StepFinished], dict[int, StepFinished]] = ({}, {})
    for event in read_events(run.journal):
        if isinstance(event, StepFinished) and event.step > saved:
            found[event.step in found[0]][event.step] = event
    return found


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
    ended = subprocess.run(
        [*_TRAIN, *arguments],
        check=False,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env=environment_of_child(),
    )
    return ended.returncode


@contextmanager
def _folder() -> Iterator[Path]:
    """Make a folder on the disk of the runs, and remove it in the end."""
    root, within = runs_root(), ExitStack()
    try:
        root.mkdir(parents=True, exist_ok=True)
        made = within.enter_context(unfinished_folder(root, ".verify-resume-"))
    except OSError as error:
        raise storage_error(root, error) from error
    with within:
        yield made


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
