"""Runs whose optimizer states live on disk: resumed from and to memory, killed, told, refused."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from fluxtrain.config.schema import load_config
from fluxtrain.core.device import disk, spill
from fluxtrain.errors import DoesNotFit, Interrupted
from fluxtrain.events import events as ev
from fluxtrain.plan.placement import Placement
from fluxtrain.train.checkpoint import shard_file
from fluxtrain.train.checkpoint.checkpoint import list_checkpoints, read_checkpoint
from fluxtrain.train.observe.disk_wait import DiskPace
from fluxtrain.train.placing import placing
from tests.engine import forked
from tests.engine.runs import told
from tests.engine.test_background_checkpoints import (
    held_to,
    in_the_midst,
    is_writing,
    slow_writer,
    states,
)
from tests.engine.test_disk_run import after, losses, run, stop
from tests.engine.test_resume import assert_same_run, finished, steps_done, wait_for

MakeConfig = Callable[..., Path]
DEMO = ["--set", "placement.host_gib=0.075", "--set", "placement.device=cpu"]


def spilled(plan: Placement, folder: str, *, also: bool) -> Placement:
    """All states on disk: a host small enough for that has no room for a run."""
    rows = [r if r.is_on("device") else replace(r, state="disk") for r in plan.groups]
    if also:
        more: dict[str, Any] = {"weights": "disk"}
        more |= {} if plan.optimizer_in_backward else {"gradients": "disk"}
        rows = [replace(r, **more) if r.kind == "block" else r for r in rows]
    return replace(plan, groups=tuple(rows), spill_folder=folder)


def on_disk(patch: pytest.MonkeyPatch, *, also: bool = True) -> None:
    """Let the runs that follow have their states on disk, with gradients and weights of blocks."""
    real = placing.place
    patch.setattr(spill, "RECORD_BYTES", 64 << 10)
    for module in (spill, disk):
        patch.setattr(module, "BLOCK_BYTES", 8 << 10)

    def small(*args: Any, **kwargs: Any) -> Placement:
        return spilled(real(*args, **kwargs), kwargs["spill"].folder, also=also)

    patch.setattr(placing, "place", small)


def model_of(run_dir: Path) -> dict[str, torch.Tensor]:
    return load_file(run_dir / "model" / "model.safetensors")


@pytest.mark.parametrize("first", ["memory", "disk"])
@pytest.mark.thinned(1)
def test_a_run_is_resumed_from_and_to_the_disk_with_the_same_bits(
    first: str, run_config: MakeConfig, tmp_path: Path
) -> None:
    config = run_config(model__dtype="bf16", train__steps=4, train__checkpoint_every=2)
    wanted = losses(run(config, tmp_path / "memory"))
    there = tmp_path / "there"
    with pytest.MonkeyPatch.context() as patch, pytest.raises(Interrupted):
        if first == "disk":
            on_disk(patch)
        after(2, stop, patch)
        run(config, there)
    with pytest.MonkeyPatch.context() as patch:
        if first == "memory":
            on_disk(patch)
        events = run(config, there, resume=str(there))
    assert losses(events) == wanted
    kept, found = model_of(tmp_path / "memory"), model_of(there)
    assert all(torch.equal(kept[name], found[name]) for name in kept)
    traffic = [event for event in events if isinstance(event, ev.TrafficSampled)]
    assert max(event.disk_written_bytes for event in traffic) > 0
    planned = [event for event in events if isinstance(event, ev.Planned)]
    planned = [one for one in planned if "disk" in {rows.state for rows in one.placement}]
    assert len(planned) == 1
    every = [c for c in planned[0].choices if c.name == "train.checkpoint_every"]
    assert "group by group" in every[-1].because


@pytest.mark.parametrize("norm", [1.0, None], ids=["clip", "backward"])
@pytest.mark.thinned(1)
def test_a_checkpoint_beside_the_steps_is_what_waiting_would_have_written(
    norm: float | None, run_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = run_config(
        model__dtype="bf16", train__steps=9, train__checkpoint_every=2, train__keep_checkpoints=9,
        train__evaluate_every="end", train__max_grad_norm=norm,
    )  # fmt: skip
    with monkeypatch.context() as patched:
        held_to(patched, 0)
        run(config, tmp_path / "waits")
    real, refused = shard_file.HashingFile.write, list[Path]()
    once = threading.Lock()  # several files are written at once

    def write(self: Any, data: bytes) -> None:
        time.sleep(0.002)
        if "step-00000004" in self._file.name and once.acquire(blocking=False):
            refused.extend(list_checkpoints(tmp_path / "goes-on" / "checkpoints"))
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(self, data)

    monkeypatch.setattr(shard_file.HashingFile, "write", write)
    on_disk(monkeypatch)
    run(config, tmp_path / "goes-on")
    assert [path.name for path in refused] == ["step-00000002"]  # stays whole
    one, other = states(tmp_path / "waits"), states(tmp_path / "goes-on")
    assert {2, 8, 9} <= set(other)
    for step in set(one) & set(other):
        assert other[step][0] == one[step][0]
        assert other[step][1].keys() == one[step][1].keys()
        for name, tensor in other[step][1].items():
            assert torch.equal(tensor, one[step][1][name]), (step, name)
    written = told(tmp_path / "goes-on", ev.CheckpointWritten)
    held = {event.step: event.held_s for event in written}
    assert held[2] is not None and held[8] is not None and held[9] is None
    assert 0 < held[2] < written[0].seconds


def test_a_plan_refuses_the_folder_that_a_run_would(
    run_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def told_of(path: str) -> str:
        config = load_config(run_config(placement__disk="on", placement__disk_path=path))
        return placing.spill_home(config, {}, str(tmp_path)).unusable

    (tmp_path / "file").touch()
    for name in ("away", "file"):
        assert "set placement.disk_path to a folder that is there" in told_of(str(tmp_path / name))
    monkeypatch.setenv("HOME", str(tmp_path))
    assert not told_of("~")


@pytest.mark.slow
def test_the_demo_on_a_small_host_names_the_setting_and_trains_with_it(tmp_path: Path) -> None:
    def fluxtrain(*args: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "fluxtrain", "train", "--demo", *DEMO, *args]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)

    few = ["--set", "train.steps=3", "--set", "train.batch_rows=1"]
    refused = fluxtrain(*few)
    assert refused.returncode == DoesNotFit.exit_code
    assert "placement.disk=on fits" in refused.stderr
    made = fluxtrain(*few, "--set", "placement.disk=on", "--run-dir", "one")
    assert made.returncode == 0, made.stderr
    names = {path.name for path in (tmp_path / "one").iterdir()}
    assert not [name for name in names if name.startswith(".")]


def spilling(arguments: list[str]) -> None:
    """`fluxtrain ARGUMENTS` with all states on disk, whose writes and files take a while."""
    real = os.pwritev

    def slow(*given: Any) -> int:
        time.sleep(0.002)
        return real(*given)

    os.pwritev = slow
    on_disk(pytest.MonkeyPatch())
    slow_writer(arguments)


@pytest.mark.slow
def test_kills_while_it_spills_leave_nothing_and_lose_nothing_older(
    run_config: MakeConfig, tmp_path: Path
) -> None:
    config = run_config(
        model__dtype="bf16", train__steps=80, train__checkpoint_every=8, train__evaluate_every="end"
    )
    assert finished("train", config, "--run-dir", tmp_path / "whole") == 0
    run_dir, begun = tmp_path / "killed", 0
    arguments = ["train", str(config), "--run-dir", str(run_dir), "--resume", "auto"]
    for number in range(6):
        with forked.running(spilling, arguments) as process:
            wait_for(partial(in_the_midst, process, run_dir, steps_done(run_dir) + number % 3))
            begun += is_writing(run_dir)
            process.kill()
        for path in list_checkpoints(run_dir / "checkpoints"):
            read_checkpoint(path)
        assert not list(run_dir.glob(".*"))
    assert begun >= 3
    planned = [one.placement for one in told(run_dir, ev.Planned)]  # too short for a sample
    assert all("disk" in {rows.state for rows in table} for table in planned)
    assert finished("train", config, "--run-dir", run_dir, "--resume", "auto") == 0
    assert_same_run(tmp_path / "whole", run_dir)


class _Disk:
    folder, read_bytes, written_bytes, busy_s = Path("/runs"), 0, 0, 0.0

    def moves(self, size_bytes: int, seconds: float) -> None:
        self.read_bytes += size_bytes
        self.written_bytes += size_bytes
        self.busy_s += seconds


def test_a_drive_that_falls_behind_its_rates_is_told_with_the_new_end() -> None:
    disk, told = _Disk(), list[str]()
    pace = DiskPace(disk, 2e9, 1e9, told.append)  # type: ignore[arg-type]
    disk.moves(10**9, 1.6)
    pace.step_done(9, 60.0)  # too little to judge by
    for _ in range(3):
        disk.moves(10**10, 15.0)
        pace.step_done(9, 60.0)
    assert not told
    for seconds, count in ((45.0, 1), (50.0, 1), (120.0, 2)):
        disk.moves(10**10, seconds)
        pace.step_done(8, 7200.0)
        assert len(told) == count
    assert "3.0 times as long" in told[0] and "the 8 steps left take 2" in told[0]
    unknown = DiskPace(disk, None, 1e9, told.append)  # type: ignore[arg-type]
    unknown.step_done(1, 1.0)
    assert len(told) == 2
