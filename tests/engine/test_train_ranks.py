"""`fluxtrain train` in several processes: the run of one process, whoever began it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import distributed

from fluxtrain.events import events as ev
from fluxtrain.events.run_folder.run_dir import RunDir
from tests.engine import forked, ranks
from tests.engine.runs import MakeConfig, losses, of, run, told, weights

STEPS = {
    "train__steps": 4, "train__batch_rows": 4, "train__accumulation": 2,
    "train__checkpoint_every": 2, "train__evaluate_every": 2, "train__schedule": "constant",
    "placement__chunk_rows": 1,
}  # fmt: skip


def runs_of_two(config: Path, folder: Path) -> list[int]:
    """The same run by two ranks from its start, and from where one process stopped."""
    return [
        ranks.train(config, folder / "two", []),
        ranks.train(config, folder / "resumed", ["train.steps=4"], "auto"),
        ranks.train(config, folder / "stopped", ["train.steps=2"]),
        ranks.train(config, folder / "uneven", ["train.batch_rows=3"]),
        ranks.train(config, folder / "other", [f"train.seed={distributed.get_rank()}"]),
    ]


def test_two_ranks_are_the_run_of_one_process_and_go_on_with_it(
    run_config: MakeConfig, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    config = run_config(**STEPS)
    one = run(config, tmp_path / "one")
    run(config, tmp_path / "resumed", "train.steps=2")
    codes = ranks.together(2, runs_of_two, tmp_path / "ranks", config, tmp_path)
    assert codes == [[0, 0, 0, 2, 2]] * 2
    run(config, tmp_path / "stopped", resume="auto")
    for name in ("two", "resumed", "stopped"):
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
    printed = capfd.readouterr().err
    assert "train.batch_rows is 3, and 2 processes share a batch evenly" in printed
    assert "train.seed is 0 in rank 0 and 1 in rank 1 of 2" in printed
    assert not (tmp_path / "other" / "checkpoints").exists()


def same(one: Path, other: Path) -> None:
    """One run but for the last digits, by its losses and weights."""
    first, second = (losses(told(place, ev.StepFinished)) for place in (one, other))
    assert second == pytest.approx(first, rel=1e-4)
    left, right = weights(one), weights(other)
    apart = sum(float((left[name] - right[name]).abs().sum()) for name in left)
    assert apart < 1e-4 * sum(float(left[name].abs().sum()) for name in left)


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
