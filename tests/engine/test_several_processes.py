"""One of several processes that are not joined when a model is wrapped would train alone."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import typer
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel
from transformers import Trainer, TrainingArguments

import fluxtrain
from fluxtrain.commands import processes
from fluxtrain.config.schema import demo_config
from fluxtrain.core.ranks.join import Ranks
from fluxtrain.core.wrap.engine import engine_of
from fluxtrain.errors import BadInput, MisusedModel
from fluxtrain.events.emitter import Emitter
from fluxtrain.events.events import Failed
from fluxtrain.events.run_folder.run_dir import RunDir
from fluxtrain.train.checkpoint.recovery import Target, locate
from tests.engine import forked
from tests.engine.ranks import join
from tests.on_cards import batch, llama

Run = Callable[..., subprocess.CompletedProcess[str]]
WORDS = "one of 2 processes"
TWO = ["parallel.processes=2"]


def step(model: nn.Module, *, in_backward: bool = False) -> None:
    """Train one step on rows of this process."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loss = model(**batch()).loss
    if in_backward:
        engine_of(model).begin_step_in_backward(optimizer)
    loss.backward()
    optimizer.step()


def weights(model: nn.Module) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in model.parameters()]


def joined_after_wrap(rank: int, folder: Path) -> None:
    models = [fluxtrain.wrap(llama(2), device="cpu") for _ in range(3)]
    join(rank, 2, folder / "meeting")
    before = weights(models[0])
    with pytest.raises(MisusedModel, match=WORDS):
        step(DistributedDataParallel(models[0]))
    with pytest.raises(MisusedModel, match=WORDS):
        step(models[1], in_backward=True)
    arguments = TrainingArguments(
        output_dir=str(folder / f"out{rank}"), max_steps=2, use_cpu=True, report_to=[]
    )
    with pytest.raises(MisusedModel, match=WORDS):
        rows = [{name: rows[0] for name, rows in batch().items()}] * 4
        Trainer(models[2], arguments, train_dataset=rows).train()
    for model in models:
        assert all(map(torch.equal, before, weights(model)))
    distributed.destroy_process_group()


def test_a_group_that_is_joined_after_wrap_is_refused_before_a_weight_changes(
    tmp_path: Path,
) -> None:
    with forked.running(joined_after_wrap, 1, tmp_path) as other:
        assert forked.exit_code(joined_after_wrap, 0, tmp_path) == 0
        other.join(forked.LIMIT_S)
        assert other.exitcode == 0


@pytest.fixture
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)  # a group has one of its own
    join(0, 1, tmp_path / "meeting")
    yield
    distributed.destroy_process_group()


@pytest.mark.usefixtures("alone")
def test_a_group_of_one_process_trains(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "1")
    model = fluxtrain.wrap(llama(2), device="cpu")
    before = weights(model)
    step(DistributedDataParallel(model))
    assert not any(map(torch.equal, before, weights(model)))


@pytest.mark.usefixtures("alone")
def test_groups_of_ours_wait_as_long_as_the_users_own() -> None:
    ranks = Ranks(rank=0, world=1, processes=(("here", os.getpid()),))
    groups = [ranks.device_group(torch.device("cpu")), ranks.of_machine().host]
    for group in (distributed.group.WORLD, *groups):
        options = group._get_backend(torch.device("cpu")).options
        assert options._timeout.total_seconds() == 120


def test_wrap_before_the_ranks_are_joined_names_the_cure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(MisusedModel, match=r"one of 2 processes.*init_process_group"):
        fluxtrain.wrap(llama(2), device="cpu")


def test_a_run_under_a_launcher_ends_with_2_and_leaves_nothing(
    fluxtrain: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    for command in ("train", "plan"):
        answer = fluxtrain(command, "--demo")
        assert answer.returncode == 2, answer.stderr
        assert WORDS in answer.stderr and answer.stderr.count("\n") == 1
    assert not list(tmp_path.rglob("*.json"))


def test_processes_are_not_started_in_a_folder_that_is_in_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "launch", lambda *_: pytest.fail("processes were started"))
    used, config = RunDir(tmp_path / "run"), demo_config(TWO)
    lock = used.lock()
    with pytest.raises(BadInput, match=f"in use by process {os.getpid()}"):
        processes.train_in_processes(config, locate(None, used.path, config), [])
    lock.release()


def test_a_second_start_is_refused_while_the_first_ones_processes_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, config, starts = tmp_path / "run", demo_config(TWO), []

    def start() -> None:
        processes.train_in_processes(config, locate(None, folder, config), [])

    def launched(*_: object) -> int:
        starts.append(1)
        with pytest.raises(BadInput, match=f"{folder} is in use by another process"):
            start()
        return 0

    monkeypatch.setattr(processes, "launch", launched)
    with pytest.raises(typer.Exit):
        start()
    assert len(starts) == 1 and not folder.exists()


@pytest.mark.parametrize(
    ("told", "status", "code", "starts"),
    [(7, 1, 7, 3), (2, 1, 2, 1), (None, 1, 7, 3), (7, 3, 3, 1)],
    ids=["killed", "refused", "without a word", "another rank has no memory"],
)
def test_all_start_again_where_one_died_and_not_where_a_run_is_refused(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    told: int | None,
    status: int,
    code: int,
    starts: int,
) -> None:
    folder, began = tmp_path / "run", []
    folder.mkdir()
    earlier = Emitter(RunDir(folder).journal)
    earlier.emit(Failed(exit_code=4, kind="Diverged", message="the loss was nan yesterday"))

    def launched(*_: object) -> int:
        began.append(1)
        if told is not None:
            earlier.emit(Failed(exit_code=told, kind="RankLost", message="rank 1 has ended"))
        return status

    monkeypatch.setattr(processes, "launch", launched)
    config = demo_config([*TWO, "parallel.restarts=2"])
    with pytest.raises(typer.Exit) as ended:
        processes.train_in_processes(config, Target(run_dir=RunDir(folder), resumes=True), [])
    assert (ended.value.exit_code, len(began)) == (code, starts)
    last = capsys.readouterr().err.splitlines()[-1]
    assert ("rank 1 has ended" if told else "ended without a word") in last
    assert (f"--resume {folder}" in last) is (code == 7)


@pytest.mark.parametrize(
    ("status", "code", "words"),
    [(5, 5, "ended with exit code 5"), (-9, 7, "ended without a word")],
)
def test_a_run_whose_disk_is_full_ends_with_the_code_that_it_could_not_write(
    status: int, code: int, words: str,
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    (folder := tmp_path / "run").mkdir()
    monkeypatch.setattr(processes, "launch", lambda *_: status)
    with pytest.raises(typer.Exit) as ended:
        target = Target(run_dir=RunDir(folder), resumes=True)
        processes.train_in_processes(demo_config(TWO), target, [])
    assert ended.value.exit_code == code
    (last,) = capsys.readouterr().err.splitlines()
    assert words in last and f"--resume {folder}" in last
