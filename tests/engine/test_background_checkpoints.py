"""Checkpoints in the background: the state of one moment, whatever training does meanwhile."""

from __future__ import annotations

import errno
import os
import threading
import time
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fluxtrain.errors import Diverged
from fluxtrain.events import events as ev
from fluxtrain.train.checkpoint import background, shard_file
from fluxtrain.train.checkpoint.checkpoint import list_checkpoints, read_checkpoint
from fluxtrain.train.loop import TrainingLoop
from fluxtrain.train.placing import snapshot as choosing
from fluxtrain.train.placing.snapshot import choose_snapshot
from fluxtrain.train.run_plan import RunPlan
from tests.engine import forked
from tests.engine.runs import MakeConfig, run, told
from tests.engine.test_resume import assert_same_run, finished, steps_done, wait_for
from tests.refused_threads import refuse_thread

MIB = 1 << 20


def held_to(monkeypatch: pytest.MonkeyPatch, budget_bytes: int) -> None:
    """Let copies take so much host memory; 0: checkpoints are written as training waits."""
    chosen = choosing.Snapshot(budget_bytes=budget_bytes, how="as the test says", because="")
    monkeypatch.setattr(RunPlan, "snapshot", lambda _, *, keeps: chosen)


def slowly(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    """Let each copy of a group take a while, so that steps go on beside it."""
    real = background._copied

    def copied(tensors: dict[str, Tensor], *how: Any) -> dict[str, Tensor]:
        time.sleep(seconds)
        return real(tensors, *how)

    monkeypatch.setattr(background, "_copied", copied)


def states(run_dir: Path) -> dict[int, tuple[dict[str, Any], dict[str, Tensor]]]:
    """The content of all checkpoints by step, without what depends on the clock."""
    found = {}
    for path in list_checkpoints(run_dir / "checkpoints"):
        checkpoint = read_checkpoint(path)
        content = checkpoint.trainer_state()
        content["run"].pop("trained_s")
        tensors = {f"{n}.{k}": t.clone() for n, s in checkpoint.load_shards() for k, t in s.items()}
        found[checkpoint.step] = (content, tensors)
    return found


SETTINGS: list[dict[str, object]] = [
    {"train__max_grad_norm": 1.0},
    {"train__max_grad_norm": None},  # updates in the backward pass
    {"train__max_grad_norm": 1.0, "model__dtype": "bfloat16", "train__states": "8bit"},
    {"train__max_grad_norm": 1.0, "model__dtype": "float16"},
    {"train__max_grad_norm": 1.0, "train__accumulation": 2, "train__moments": "deferred"},
    {"train__max_grad_norm": 1.0, "placement__offload": "none"},  # a device updates
]


@pytest.mark.parametrize(
    "settings", SETTINGS, ids=["clip", "backward", "8bit", "fp16", "deferred", "device"]
)
@pytest.mark.parametrize("budget_bytes", [64 * MIB, 1], ids=["whole", "group by group"])
@pytest.mark.thinned(2)
def test_what_is_written_beside_the_training_is_what_waiting_would_have_written(
    run_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    settings: dict[str, object], budget_bytes: int,
) -> None:  # fmt: skip
    config = run_config(
        train__steps=6, train__checkpoint_every=2, train__keep_checkpoints=9,
        train__evaluate_every="end", **settings,
    )  # fmt: skip
    with monkeypatch.context() as patched:
        held_to(patched, 0)
        run(config, tmp_path / "waits")
    held_to(monkeypatch, budget_bytes)
    slowly(monkeypatch, 0.02)
    run(config, tmp_path / "goes-on")
    one, other = states(tmp_path / "waits"), states(tmp_path / "goes-on")
    assert set(one) == set(other) == {2, 4, 6}
    for step, (content, tensors) in other.items():
        assert content == one[step][0]
        assert tensors.keys() == one[step][1].keys()
        for name, tensor in tensors.items():
            assert torch.equal(tensor, one[step][1][name]), (step, name)
    written = told(tmp_path / "goes-on", ev.CheckpointWritten)
    assert [event.step for event in written] == sorted(other)
    assert written[0].held_s is not None and written[0].held_s < written[0].seconds
    assert written[-1].held_s is None, "the last one is waited for"


def test_a_disk_that_is_full_in_the_background_is_told_and_waited_for(
    run_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = run_config(train__steps=8, train__checkpoint_every=2, train__evaluate_every="end")
    run(config, tmp_path / "whole")
    real, refused = shard_file.HashingFile.write, []

    def write(self: Any, data: bytes) -> None:
        if len(refused) < 3:
            refused.append(True)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(self, data)

    monkeypatch.setattr(shard_file.HashingFile, "write", write)
    run(config, tmp_path / "full", disk_wait_s=60.0)
    warnings = [
        e.text
        for e in told(tmp_path / "full", ev.LogWritten)
        if "given up" in e.text or "No space" in e.text
    ]
    assert len(warnings) == 1 and "the next checkpoint follows at once" in warnings[0]
    assert any(e.phase == "no space" for e in told(tmp_path / "full", ev.PhaseChanged))
    assert_same_run(tmp_path / "whole", tmp_path / "full")


@pytest.mark.parametrize("name", ["checkpoint-copy", "checkpoint", "copy-memory"])
def test_a_thread_that_the_system_refuses_loses_no_checkpoint(
    name: str, run_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refuse_thread(monkeypatch, name)
    config = run_config(train__steps=4, train__checkpoint_every=1, train__evaluate_every="end")
    run(config, tmp_path / "run")
    written = told(tmp_path / "run", ev.CheckpointWritten)
    assert [event.step for event in written] == [1, 2, 3, 4]
    if name != "copy-memory":
        assert all(event.held_s is None for event in written), "training waited for all of them"
    left = [thread.name for thread in threading.enumerate()]
    assert not {"checkpoint-copy", "checkpoint"} & set(left)


def slow_writer(arguments: list[str]) -> None:
    """`fluxtrain ARGUMENTS` whose disk takes a while for each write."""
    from fluxtrain.cli import main

    real = shard_file.HashingFile.write

    def write(self: Any, data: Any) -> None:
        time.sleep(0.004)
        real(self, data)

    shard_file.HashingFile.write = write  # type: ignore[method-assign]
    main(arguments)


def is_writing(run_dir: Path) -> bool:
    with suppress(FileNotFoundError):  # it is done meanwhile
        return bool(list((run_dir / "checkpoints").glob(".writing-step-*/*")))
    return False


def in_the_midst(process: Any, run_dir: Path, steps: int) -> bool:
    """Whether steps were made and a checkpoint is being written; or the process has ended."""
    writing = is_writing(run_dir) and steps_done(run_dir) > steps
    return writing or not process.is_alive()


def test_a_kill_while_a_checkpoint_is_written_beside_the_steps_loses_nothing_older(
    run_config: MakeConfig, tmp_path: Path
) -> None:
    config = run_config(train__steps=40, train__checkpoint_every=10, train__evaluate_every="end")
    assert finished("train", config, "--run-dir", tmp_path / "whole") == 0
    run_dir, begun = tmp_path / "killed", 0
    for _ in range(2):
        arguments = ["train", str(config), "--run-dir", str(run_dir), "--resume", "auto"]
        with forked.running(slow_writer, arguments) as process:
            wait_for(partial(in_the_midst, process, run_dir, steps_done(run_dir)))
            begun += is_writing(run_dir)
            process.kill()
        for path in list_checkpoints(run_dir / "checkpoints"):
            read_checkpoint(path)
    assert begun >= 1
    assert finished("train", config, "--run-dir", run_dir, "--resume", "auto") == 0
    assert_same_run(tmp_path / "whole", run_dir)


@pytest.mark.parametrize(
    ("room_bytes", "own", "how", "budget_bytes"),
    [
        (10_000, True, "in the background", 1000),
        (1500, True, "group by group", 750),
        (390, True, "while training waits", 0),
        (-5, True, "while training waits", 0),
        (None, True, "while training waits", 0),
        (10_000, False, "while training waits", 0),
    ],
)
def test_memory_beside_the_plan_decides(
    room_bytes: int | None, own: bool, how: str, budget_bytes: int
) -> None:
    chosen = choose_snapshot([100] * 10, 0, room_bytes, own_optimizer=own)
    assert (chosen.how, chosen.budget_bytes) == (how, budget_bytes)
    assert chosen.because


def test_a_run_that_ends_by_an_error_names_the_checkpoint_that_was_under_way(
    run_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slowly(monkeypatch, 0.05)
    real = TrainingLoop._compute

    def compute(self: TrainingLoop[Any], clock: Any) -> Any:
        if self.state.step == 3:  # the copies of step 2 are not all written
            raise Diverged(self._refusals.divergence("enough", "was not applied"))
        return real(self, clock)

    monkeypatch.setattr(TrainingLoop, "_compute", compute)
    config = run_config(train__steps=9, train__checkpoint_every=2, train__evaluate_every="end")
    with pytest.raises(Diverged, match=r"last good checkpoint is .*step-00000002 \(step 2\)"):
        run(config, tmp_path / "run")
    assert [event.step for event in told(tmp_path / "run", ev.CheckpointWritten)] == [2]
