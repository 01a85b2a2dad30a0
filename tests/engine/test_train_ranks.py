"""`fluxtrain train` in several processes: the run of one process, whoever began it."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch import distributed

from fluxtrain.commands.dry_run import dry_run
from fluxtrain.config.schema import load_config
from fluxtrain.core.gradients.gradients import FlatSum
from fluxtrain.core.ranks.exchange import Exchange
from fluxtrain.core.ranks.join import Ranks
from fluxtrain.core.ranks.shares import Shares
from fluxtrain.events import events as ev
from fluxtrain.events.run_folder.run_dir import RunDir
from tests.engine import forked, ranks
from tests.engine.runs import MakeConfig, losses, of, run, told, weights

STEPS = {
    "train__steps": 4, "train__batch_rows": 4, "train__accumulation": 2,
    "train__checkpoint_every": 2, "train__evaluate_every": 2, "train__schedule": "constant",
    "placement__chunk_rows": 1,
}  # fmt: skip


HOST = ["parallel.gradients=cpu_reduce"]
SHARED, WHOLE = ["parallel.params=shard"], ["placement.chunk_rows=4"]
CARDS = ["parallel.cards=2"]  # of each rank
LORA = ["method.name=lora", "method.rank=4"]


def runs_of_two(config: Path, folder: Path, every: bool) -> dict[str, str]:
    """The same run by two ranks from its start, and from where one process stopped; a part of it
    that one process goes on with."""
    ends = {
        "two": ranks.train(config, folder / "two", []),
        "cards": ranks.train(config, folder / "cards", CARDS),
        "resumed": ranks.train(config, folder / "resumed", ["train.steps=4"], "auto"),
        "stopped": ranks.train(config, folder / "stopped", [*SHARED, "train.steps=2"]),
        "host-shared": ranks.train(config, folder / "host-shared", [*HOST, *SHARED]),
        "gathered": without_memory(
            Shares.gather, [4, 5], config, folder / "gathered", [*SHARED, *WHOLE]
        ),
        "uneven": ranks.train(config, folder / "uneven", ["train.batch_rows=3"]),
        "other": ranks.train(config, folder / "other", [f"train.seed={distributed.get_rank()}"]),
        "apart": ranks.train(
            config, folder / "apart", [f"parallel.cards={1 + distributed.get_rank()}"]
        ),
    }
    if every:
        ends |= {
            "shared": ranks.train(config, folder / "shared", SHARED),
            "each": each_with_all(config, folder / "each"),
            "host": ranks.train(config, folder / "host", HOST),
            "cards-shared": ranks.train(config, folder / "cards-shared", [*CARDS, *SHARED]),
            "cards-host": ranks.train(config, folder / "cards-host", [*CARDS, *HOST]),
            "cards-again": without_memory(
                Exchange.begin, [8], config, folder / "cards-again", [*CARDS, *WHOLE]
            ),
            "host-again": without_memory(
                FlatSum.send, [14], config, folder / "host-again", [*HOST, *WHOLE]
            ),
            "again": without_memory(Exchange.begin, [8], config, folder / "again", WHOLE),
            "measured": without_memory(
                Shares.gather, [5], config, folder / "measured", [*SHARED, *WHOLE]
            ),
            "lora": ranks.train(config, folder / "lora", [*LORA, "train.steps=2"]),
        }
    return ends | {"loading": stopped_as_it_loads(config, folder / "loading")}


@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_two_ranks_are_the_run_of_one_process_and_go_on_with_it(
    run_config: MakeConfig, tmp_path: Path, every: bool
) -> None:
    config = run_config(**STEPS)
    one = run(config, tmp_path / "one")
    run(config, tmp_path / "resumed", "train.steps=2")
    ends, others = ranks.together(2, runs_of_two, tmp_path / "ranks", config, tmp_path, every)
    assert ends == others
    refused = ("uneven", "other", "apart", "loading")
    uneven, other, apart, loading = (ends.pop(name) for name in refused)
    assert set(ends.values()) == {"0"}, ends
    assert "2: train.batch_rows is 3, and 2 processes share a batch evenly" in uneven
    assert "2: train.seed is 0 in rank 0 and 1 in rank 1 of 2" in other
    assert "2: the number of cards is 1 in rank 0 and 2 in rank 1 of 2" in apart
    assert loading == "143" and not (tmp_path / "loading" / "checkpoints").exists()
    run(config, tmp_path / "stopped", resume="auto")
    lacked = dict.fromkeys(
        ("again", "cards-again", "gathered", "host-again"), "at step 2: the step"
    )
    lacked["measured"] = "after step 2: the evaluation"
    for name in lacked.keys() & ends.keys():
        warnings = " ".join(e.text for e in told(tmp_path / name, ev.LogWritten))
        what = lacked[name]
        assert f"device memory ran out in rank 1 {what} is done again" in warnings
    for name in ends.keys() - {"lora", "each", "shared"}:
        same(tmp_path / "one", tmp_path / name)
        assert not list((tmp_path / name).glob(".seen-*"))
    evaluated = [
        [e.loss for e in of(ev.EvaluationFinished, events)]
        for events in (one, told(tmp_path / "two", ev.EvaluationFinished))
    ]
    assert evaluated[1] == pytest.approx(evaluated[0], rel=1e-5)
    plan = json.loads((tmp_path / "two" / "plan.json").read_text())
    choices = {one["name"]: one["value"] for one in plan["choices"]}
    assert choices["parallel.processes"] == "2" and choices["train.batch_rows"] == "4"
    rows = told(tmp_path / "cards", ev.StepFinished)[-1].ranks
    assert [(row.card, row.cards) for row in rows] == [(0, 2), (2, 2)]
    assert not (tmp_path / "other" / "checkpoints").exists()
    if every:
        run(config, tmp_path / "lora", *LORA, resume="auto")
        run(config, tmp_path / "lora-one", *LORA)
        same(tmp_path / "lora-one", tmp_path / "lora")
        each = weights(tmp_path / "each")
        for way in ("two", "shared"):
            found = weights(tmp_path / way)
            assert all(torch.equal(each[name], found[name]) for name in each), way


def stopped_as_it_loads(config: Path, run_dir: Path) -> str:
    """The code of a run whose last rank is told to stop before it has loaded."""

    def told_to_stop(_: object) -> None:
        if distributed.get_rank() == 1:
            signal.raise_signal(signal.SIGTERM)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fluxtrain.train.run.refuse_missing_trackers", told_to_stop)
        return ranks.train(config, run_dir, []).split(":")[0]


def tried(config: Path) -> str:
    """The steps of a dry run, of which rank 0 tells."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WORLD_SIZE", "2")
        patch.setenv("RANK", str(rank := distributed.get_rank()))
        found = dry_run(load_config(config, SHARED))
    assert (found is None) is (rank == 1)
    return "3 steps" if found is None else f"{found.steps} steps"


def each_with_all(config: Path, run_dir: Path) -> str:
    """A run whose ranks share nothing, as where they cannot."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Ranks, "may_share_memory", False)
        return ranks.train(config, run_dir, [])


def without_memory(
    method: Callable[..., Any], at: list[int], config: Path, run_dir: Path, how: list[str]
) -> str:
    """A run whose last rank runs out of memory at these calls of a method. Blocks answer the first
    of a forward pass by trying fewer rows."""
    kinds, calls = {"Exchange": Exchange, "Shares": Shares, "FlatSum": FlatSum}, 0
    kind = kinds[method.__qualname__.split(".")[0]]

    def call(*arguments: Any, **options: Any) -> Any:
        nonlocal calls
        calls += distributed.get_rank() == 1
        if calls in at:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return method(*arguments, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kind, method.__name__, call)
        return ranks.train(config, run_dir, how)


def same(one: Path, other: Path) -> None:
    """One run but for the last digits, by its losses and weights."""
    first, second = (losses(told(place, ev.StepFinished)) for place in (one, other))
    assert second == pytest.approx(first, rel=1e-4)
    left, right = weights(one), weights(other)
    apart = sum(float((left[name] - right[name]).abs().sum()) for name in left)
    assert apart < 1e-4 * sum(float(left[name].abs().sum()) for name in left)


@pytest.mark.slow
@pytest.mark.parametrize("params", ["full", "shard"])
def test_what_four_ranks_have_begun_goes_on_with_one_two_and_three(
    run_config: MakeConfig, tmp_path: Path, params: str
) -> None:
    config = run_config(**STEPS | {"train__batch_rows": 12, "parallel__params": params})
    one = ["parallel.params=full"]
    run(config, tmp_path / "one", *one)
    begun = ["train.steps=2"]
    told_codes = ranks.together(4, ranks.train, tmp_path / "four", config, tmp_path / "1", begun)
    assert told_codes == ["0"] * 4
    for world in (2, 3):
        shutil.copytree(tmp_path / "1", tmp_path / str(world))
    run(config, tmp_path / "1", *one, resume="auto")
    for world in (2, 3):
        place, on = tmp_path / str(world), ["train.steps=4"]
        codes = ranks.together(
            world, ranks.train, tmp_path / f"on-{world}", config, place, on, "auto"
        )
        assert codes == ["0"] * world
    for world in (1, 2, 3):
        same(tmp_path / "one", tmp_path / str(world))


@pytest.mark.slow
def test_two_agents_train_one_model_as_two_machines_do(
    run_config: MakeConfig, tmp_path: Path
) -> None:
    config, run_dir = run_config(**{**STEPS, "train__steps": 2}), tmp_path / "run"
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        end = f"127.0.0.1:{free.getsockname()[1]}"
    command: list[Any] = [
        *(sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1"),
        *("--rdzv-backend=c10d", f"--rdzv-endpoint={end}", "--local-addr=127.0.0.1"),
        *("-m", "fluxtrain", "train", config, "--run-dir", run_dir, "--resume", "auto"),
    ]
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    agents = [subprocess.Popen(command, env=environment) for _ in range(2)]
    try:
        assert [agent.wait(forked.LIMIT_S) for agent in agents] == [0, 0]
    finally:
        for agent in agents:
            agent.kill()
    found = RunDir(run_dir).summary()
    assert (found.state, found.step, found.exit_code) == ("finished", 2, 0)


@pytest.mark.slow
def test_a_run_starts_its_processes_and_ends_with_their_code(
    run_config: MakeConfig, tmp_path: Path
) -> None:
    config = run_config(**{**STEPS, "train__steps": 2})
    command = ("-m", "fluxtrain", "train", config, "--run-dir", tmp_path / "run")
    cores = {"CUDA_VISIBLE_DEVICES": ""}
    answer = forked.python(*command, "--set", "parallel.processes=2", environment=cores)
    assert answer.returncode == 0, answer.stderr
    found = RunDir(tmp_path / "run").summary()
    assert (found.state, found.step, found.exit_code) == ("finished", 2, 0)
    assert torch.isfinite(torch.tensor(losses(told(tmp_path / "run", ev.StepFinished)))).all()


def ranks_of(run_dir: Path) -> dict[int, int]:
    """The processes of a run's ranks, by their numbers."""
    found: dict[int, int] = {}
    for process in psutil.process_iter(["cmdline"]):
        if str(run_dir) in (process.info["cmdline"] or ()):
            with suppress(psutil.Error):
                told = process.environ()
                if "TORCHELASTIC_RUN_ID" in told:
                    found[int(told["RANK"])] = process.pid
    return found


@pytest.mark.slow
@pytest.mark.parametrize(("killed", "restarts"), [(0, 0), (1, 0), (1, 1)])
def test_a_killed_rank_ends_all_and_a_restart_goes_on(
    run_config: MakeConfig, tmp_path: Path, killed: int, restarts: int
) -> None:
    config, run_dir = run_config(**{**STEPS, "train__steps": 60}), tmp_path / "run"
    command: list[Any] = [sys.executable, "-m", "fluxtrain", "train", config, "--run-dir", run_dir]
    command += ["--set", "parallel.processes=2", "--set", f"parallel.restarts={restarts}"]
    complaints = tmp_path / "complaints"
    told_to: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": complaints.open("wb")}
    with subprocess.Popen(command, **told_to) as run:
        while not (run_dir / "checkpoints").is_dir() or not told(run_dir, ev.CheckpointWritten):
            assert run.poll() is None
            time.sleep(0.1)
        os.kill(ranks_of(run_dir)[killed], signal.SIGKILL)
        began_s = time.monotonic()
        assert run.wait(120) == (0 if restarts else 7)
    assert restarts or time.monotonic() - began_s < 30.0
    assert not ranks_of(run_dir)
    last = complaints.read_text().splitlines()[-1]
    assert restarts or (last.startswith("error: ") and f"--resume {run_dir}" in last)
    if restarts:
        assert RunDir(run_dir).summary().step == 60


def is_in(run_dir: Path, phase: str) -> bool:
    """Whether the run has come to a phase, or to the step of that number."""
    if not (run_dir / "events.ndjson").exists():
        return False
    if phase.isdecimal():
        return any(step.step >= int(phase) for step in told(run_dir, ev.StepFinished))
    return any(change.phase == phase for change in told(run_dir, ev.PhaseChanged))


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1, "agent"])
@pytest.mark.parametrize("phase", ["loading", "training", "1", "evaluating", "saving", "4"])
def test_whoever_is_killed_in_whatever_phase_all_end_and_the_run_goes_on(
    run_config: MakeConfig, tmp_path: Path, phase: str, victim: int | str
) -> None:
    config, run_dir = run_config(**STEPS), tmp_path / "run"
    run(config, tmp_path / "one")
    command: list[Any] = [sys.executable, "-m", "fluxtrain", "train", config, "--run-dir", run_dir]
    command += ["--set", "parallel.processes=2"]
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, env=environment) as front:
        while not is_in(run_dir, phase):
            assert front.poll() is None
            time.sleep(0.01)
        if victim == "agent":
            psutil.Process(front.pid).children()[0].kill()
        else:
            os.kill(ranks_of(run_dir)[int(victim)], signal.SIGKILL)
        began_s = time.monotonic()
        assert front.wait(120) in ((0, 7) if phase == "4" else (7,))
    # a process that is ending shows no environment any more, and still holds the folder
    while ranks_of(run_dir) or ((user := RunDir(run_dir).user()) is not None and user.is_alive()):
        time.sleep(0.1)
    print(f"all had ended {time.monotonic() - began_s:.1f} s later")
    assert time.monotonic() - began_s < 30.0
    run(config, run_dir, resume="auto")
    one, other = weights(tmp_path / "one"), weights(run_dir)
    apart = sum(float((one[name] - other[name]).abs().sum()) for name in one)
    assert apart < 1e-4 * sum(float(one[name].abs().sum()) for name in one)


@pytest.mark.slow
def test_ranks_end_with_what_started_them(run_config: MakeConfig, tmp_path: Path) -> None:
    config, run_dir = run_config(**{**STEPS, "train__steps": 500}), tmp_path / "run"
    command: list[Any] = [sys.executable, "-m", "fluxtrain", "train", config, "--run-dir", run_dir]
    with subprocess.Popen([*command, "--set", "parallel.processes=2"]) as run:
        while not is_in(run_dir, "1"):
            assert run.poll() is None
            time.sleep(0.1)
        run.kill()
    deadline_s = time.monotonic() + 10.0
    while ranks_of(run_dir):
        assert time.monotonic() < deadline_s
        time.sleep(0.1)
