"""A run that was killed, stopped or damaged goes on with the same losses, bit for bit."""

from __future__ import annotations

import json
import os
import random
import shlex
import signal
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from fluxtrain.cli import main
from fluxtrain.events.events import (
    CheckpointWritten,
    Done,
    EvaluationFinished,
    Failed,
    Hello,
    LogWritten,
    StepFinished,
)
from fluxtrain.events.run_folder.run_dir import RunDir
from fluxtrain.train.checkpoint.checkpoint import read_checkpoint
from fluxtrain.train.evaluate import evaluate
from tests.engine import forked
from tests.engine.runs import told, weights


def running(*arguments: object) -> AbstractContextManager[ForkServerProcess]:
    """`fluxtrain ARGUMENTS`, killed where it has not ended by itself."""
    return forked.running(main, [str(argument) for argument in arguments])


def finished(*arguments: object) -> int:
    """The exit code of `fluxtrain ARGUMENTS`."""
    return forked.exit_code(main, [str(argument) for argument in arguments])


def wait_for(condition: Callable[[], bool], timeout_s: float = 200.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.005)


def steps_done(run_dir: Path) -> int:
    """Counted without reading them, for those who ask every few milliseconds."""
    try:
        return (run_dir / "events.ndjson").read_bytes().count(b'{"event":"step",')
    except FileNotFoundError:
        return 0


def curve(run_dir: Path) -> dict[int, set[tuple[float, float, float | None]]]:
    """What every process of the run said about each step: loss, learning rate, norm."""
    said: dict[int, set[tuple[float, float, float | None]]] = {}
    for step in told(run_dir, StepFinished):
        said.setdefault(step.step, set()).add((step.loss, step.learning_rate, step.grad_norm))
    return said


def files_of(run_dir: Path) -> dict[Path, bytes]:
    """All that the run holds but for what every process writes there."""
    told = {"events.ndjson", "engine.log", "pid"}
    files = (path for path in run_dir.rglob("*") if path.is_file() and path.name not in told)
    return {path: path.read_bytes() for path in files}


def refusal(run_dir: Path) -> str:
    """Why the newest process ended, by the journal."""
    return str(told(run_dir, Failed)[-1].message)


def assert_same_run(one: Path, other: Path) -> None:
    """The same losses, rates, norms and final weights, and no step told in two ways."""
    assert curve(one) == curve(other)
    assert all(len(said) == 1 for said in curve(one).values())
    left, right = weights(one), weights(other)
    assert left.keys() == right.keys()
    assert all(torch.equal(left[name], right[name]) for name in left)


def kill_and_resume(config: Path, run_dir: Path, *, kills: int, seed: int, typical_s: float) -> int:
    """Kill a run at `kills` random moments and let it end; returns how many processes trained.

    Every other moment is counted from the greeting, so that many have trained on any machine.
    """
    dice = random.Random(seed)
    for number in range(kills):
        with running("train", config, "--run-dir", run_dir, "--resume", "auto") as process:
            if number % 2:
                pid = process.pid
                wait_for(lambda pid=pid: greeted(run_dir, pid) or not process.is_alive())
                time.sleep(dice.uniform(0.0, 0.3) * typical_s)
            else:
                time.sleep(dice.uniform(0.2, 1.0) * typical_s)
            process.kill()
    assert finished("train", config, "--run-dir", run_dir, "--resume", "auto") == 0
    return len({hello.pid for hello in told(run_dir, Hello)})


def greeted(run_dir: Path, pid: int | None) -> bool:
    """Whether the process `pid` has begun to train here."""
    journal = run_dir / "events.ndjson"
    return journal.exists() and any(hello.pid == pid for hello in told(run_dir, Hello))


RunConfig = Callable[..., Path]


@pytest.fixture(scope="module", autouse=True)
def _warm_processes() -> None:
    """The first process waits for the imports; times after that are those of runs."""
    assert finished("--help") == 0


def reference(config: Path, run_dir: Path) -> float:
    """An undisturbed run; returns its seconds."""
    started_s = time.monotonic()
    assert finished("train", config, "--run-dir", run_dir) == 0
    return time.monotonic() - started_s


@pytest.mark.parametrize("kills", [4, pytest.param(10, marks=pytest.mark.slow)])
def test_kills_at_random_moments_change_no_loss(
    kills: int, run_config: RunConfig, tmp_path: Path
) -> None:
    config = run_config(train__steps=24, train__checkpoint_every=3, train__accumulation=2)
    typical_s = reference(config, tmp_path / "whole")
    processes = kill_and_resume(
        config, tmp_path / "killed", kills=kills, seed=2, typical_s=typical_s
    )
    assert (
        processes >= 2 + (kills == 10) * 2
    )  # the others were killed before they greeted, or had nothing left to do
    assert sorted(curve(tmp_path / "killed")) == list(range(1, 25))
    assert_same_run(tmp_path / "whole", tmp_path / "killed")


@pytest.mark.parametrize(
    ("number", "code"),
    [pytest.param(signal.SIGINT, 130, marks=pytest.mark.slow), (signal.SIGTERM, 143)],
)
def test_a_signal_writes_a_checkpoint_and_the_run_goes_on_exactly(
    run_config: RunConfig, tmp_path: Path, number: signal.Signals, code: int
) -> None:
    config = run_config(train__steps=60, train__checkpoint_every="end", train__evaluate_every="end")
    reference(config, tmp_path / "whole")
    stopped = tmp_path / "stopped"
    with running("train", config, "--run-dir", stopped) as process:
        wait_for(lambda: steps_done(stopped) >= 3)
        os.kill(process.pid or 0, number)
        process.join(200)
        assert process.exitcode == code
    done = told(stopped, Done)[-1]
    assert done.exit_code == code
    assert done.resume_with == f"fluxtrain train --resume {stopped}"
    assert told(stopped, CheckpointWritten)[-1].step == done.step == steps_done(stopped) < 60
    assert json.loads((stopped / "result.json").read_text())["exit_code"] == code
    assert finished("train", "--resume", stopped) == 0
    assert_same_run(tmp_path / "whole", stopped)


def test_a_signal_of_a_scheduler_writes_a_checkpoint_and_the_run_goes_on(
    run_config: RunConfig, tmp_path: Path
) -> None:
    config = run_config(train__steps=60, train__checkpoint_every="end", train__evaluate_every="end")
    with running("train", config, "--run-dir", tmp_path / "run") as process:
        wait_for(lambda: steps_done(tmp_path / "run") >= 3)
        os.kill(process.pid or 0, signal.SIGUSR1)
        process.join(200)
        assert process.exitcode == 0
    first, last = told(tmp_path / "run", CheckpointWritten)
    assert 3 <= first.step < last.step == 60


_INTERRUPTED_TWICE = """
import signal, sys
from fluxtrain.events.run_folder.run_dir import RunDir
from fluxtrain.train.session import Session

with Session(RunDir(sys.argv[1])) as session:
    session.listen()
    session.begin_training()
    for _ in range(2):
        signal.raise_signal(signal.SIGINT)
"""


@pytest.mark.parametrize(
    ("checkpoints", "kept"),
    [
        ([], "no checkpoint was written yet"),
        (
            ["step-00000003", "step-00000006", ".writing-step-00000009"],
            "checkpoint step-00000006 stands",
        ),
    ],
)
def test_a_second_interrupt_says_what_is_kept_and_leaves_no_socket(
    tmp_path: Path, checkpoints: list[str], kept: str
) -> None:
    for name in checkpoints:
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
    ended = forked.python("-c", _INTERRUPTED_TWICE, tmp_path)
    assert ended.returncode == 130
    assert ended.stderr.splitlines()[-1] == f"second interrupt: ending now; {kept}"
    assert RunDir(tmp_path).liveness() == "dead"
    assert not RunDir(tmp_path).socket.exists()


def test_an_evaluation_that_a_stop_cut_short_is_done_when_the_run_goes_on(
    run_config: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = run_config(train__steps=4, train__evaluate_every=2)
    reference(config, tmp_path / "whole")

    def interrupted(
        objective: Any, model: Any, batches: Any, stop: Callable[[], bool], *ranks: Any, **more: Any
    ) -> Any:
        if not evaluated:
            evaluated.append(True)
            return evaluate(objective, model, batches, stop, *ranks, **more)
        signal.raise_signal(signal.SIGTERM)
        assert stop()
        return evaluate(objective, model, batches, stop, *ranks, **more)

    evaluated: list[bool] = []
    run_dir = tmp_path / "stopped"
    with monkeypatch.context() as patched, pytest.raises(SystemExit) as ended:
        patched.setattr("fluxtrain.train.loop.evaluate", interrupted)
        main(["train", str(config), "--run-dir", str(run_dir)])
    assert ended.value.code == 143
    assert finished("train", config, "--run-dir", run_dir, "--resume", "auto") == 0
    losses = [
        {e.step: e.loss for e in told(path, EvaluationFinished)}
        for path in (tmp_path / "whole", run_dir)
    ]
    assert losses[0] == losses[1]
    assert_same_run(tmp_path / "whole", run_dir)


@pytest.mark.parametrize("states", ["bf16", "8bit"])
@pytest.mark.slow
def test_low_bit_optimizer_states_come_back_exactly(
    run_config: RunConfig, tmp_path: Path, states: str
) -> None:
    settings = {"train__states": states, "model__path": "demo", "train__steps": 4}
    config = run_config(train__checkpoint_every=2, **settings)
    run_dir = tmp_path / "run"
    reference(config, run_dir)
    before = weights(run_dir)
    shards = [load_file(path) for path in (run_dir / "checkpoints").rglob("*.safetensors")]
    held = {key.rsplit(".", 1)[-1] for shard in shards for key in shard}
    assert {"bf16": "m_bf16", "8bit": "m_codes"}[states] in held
    assert finished("train", "--resume", run_dir / "checkpoints" / "step-00000002") == 0
    assert all(len(said) == 1 for said in curve(run_dir).values())
    assert all(torch.equal(before[name], value) for name, value in weights(run_dir).items())


def test_a_run_goes_on_from_a_named_checkpoint(run_config: RunConfig, tmp_path: Path) -> None:
    config = run_config(train__steps=6, train__checkpoint_every=2, train__keep_checkpoints=3)
    run_dir = tmp_path / "run"
    reference(config, run_dir)
    before = weights(run_dir)
    assert finished("train", "--resume", run_dir / "checkpoints" / "step-00000002") == 0
    assert told(run_dir, Hello)[-1].first_step == 2
    assert all(len(said) == 1 for said in curve(run_dir).values())
    assert all(torch.equal(before[name], value) for name, value in weights(run_dir).items())


def test_a_diverged_runs_advice_goes_on_from_its_checkpoint(
    run_config: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, run_dir = run_config(train__steps=12, train__checkpoint_every=2), tmp_path / "run"

    def too_high(_name: str, step: int, **_: int) -> float:
        return 1e32 if step == 2 else 1.0

    with monkeypatch.context() as patched, pytest.raises(SystemExit) as ended:
        patched.setattr("fluxtrain.train.run.factor", too_high)
        main(["train", str(config), "--run-dir", str(run_dir)])
    assert ended.value.code == 4
    command = shlex.split(refusal(run_dir).rpartition("go on with a lower rate: ")[2])
    assert command == ["fluxtrain", "train", "--resume", str(run_dir), *command[4:]]
    assert finished(*command[1:]) == 0
    assert told(run_dir, Hello)[-1].first_step == 2
    words = "from step 3 on learning rate was 0.001 and is 0.0001"
    warnings = [log.text for log in told(run_dir, LogWritten) if log.level == "warning"]
    assert any(text.startswith(words) for text in warnings)
    newest = read_checkpoint(run_dir / "checkpoints" / "step-00000012").trainer_state()
    assert newest["run"]["changed"] == [words]
    assert finished("train", "--run-dir", run_dir, "--resume", "auto") == 0  # with the lower rate


OTHER_SETTINGS: dict[str, dict[str, object]] = {
    "train.learning_rate was 0.001 and is 0.002": {"train__learning_rate": 2e-3},
    "batch_rows was 4 and is 2": {"train__batch_rows": 2},
    "data.sequence_length was 32 and is 16": {"data__sequence_length": 16},
    "data.seed was 0 and is 1": {"data__seed": 1},
    "train.states was 'fp32' and is '8bit'": {"train__states": "8bit"},
}


def test_a_resume_with_other_settings_says_what_differs(
    run_config: RunConfig, tmp_path: Path
) -> None:
    config = run_config(train__checkpoint_every=2)
    run_dir = tmp_path / "run"
    reference(config, run_dir)
    kept = files_of(run_dir)
    for named, change in OTHER_SETTINGS.items():
        other = run_config("other.yaml", train__checkpoint_every=2, **change)
        assert finished("train", other, "--run-dir", run_dir, "--resume", "auto") == 2
        assert named in refusal(run_dir)
        assert files_of(run_dir) == kept
        assert RunDir(run_dir).liveness() == "finished"
    assert finished("train", "--run-dir", run_dir, "--resume", "auto") == 0


def test_a_killed_run_goes_on_whatever_was_refused_in_between(
    run_config: RunConfig, tmp_path: Path
) -> None:
    config = run_config(train__checkpoint_every=2)
    straight, run_dir = tmp_path / "straight", tmp_path / "run"
    reference(config, straight)
    with running("train", config, "--run-dir", run_dir) as process:
        saved = run_dir / "checkpoints"
        wait_for(lambda: steps_done(run_dir) >= 3 and any(saved.glob("step-*")))
        process.kill()
        process.join()
    kept = files_of(run_dir)
    for change in ("model.path=nowhere", "data.path=nowhere.txt", "train.seed=5"):
        again = finished("train", "--run-dir", run_dir, "--resume", "auto", "--set", change)
        assert again == 2
    assert files_of(run_dir) == kept
    assert finished("train", "--run-dir", run_dir, "--resume", "auto") == 0
    assert_same_run(run_dir, straight)
