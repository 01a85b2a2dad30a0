"""`fluxtrain dry-run`: three real steps that leave nothing behind."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from fluxtrain.commands import dry_run as trial
from fluxtrain.config.schema import load_config
from fluxtrain.errors import DoesNotFit
from fluxtrain.events.run_folder.run_dir import RunDir
from fluxtrain.train.run import train
from tests.engine import forked

MakeConfig = Callable[..., Path]


@pytest.fixture(autouse=True)
def own_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Runs and temporary files go where they can be counted."""
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setenv("FLUXTRAIN_RUNS", str(tmp_path / "runs"))
    monkeypatch.setenv("TMPDIR", str(temporary))
    monkeypatch.setattr("tempfile.tempdir", None)
    return temporary


def test_three_steps_are_those_of_the_run_and_nothing_is_left(
    run_config: MakeConfig, tmp_path: Path, own_folders: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = run_config(train__steps=50, train__warmup_steps=10, train__max_grad_norm=1.0)
    found = trial.dry_run(load_config(config))
    assert (found.steps, found.total_steps) == (3, 50)
    assert list(own_folders.iterdir()) == []
    assert not (tmp_path / "runs").exists()
    assert capsys.readouterr().out == "", "standard output is for the answer"

    real = load_config(config, ["train.steps=3", "train.warmup_steps=3"])
    run = RunDir(tmp_path / "real")
    train(real, trial.Target(run_dir=run, resumes=False))
    result = json.loads(run.result.read_text())
    assert found.losses[-1] == result["loss"]
    assert found.losses[0] == result["first_loss"]


def test_measured_stands_beside_predicted(run_config: MakeConfig) -> None:
    found = trial.dry_run(load_config(run_config(train__steps=50)))
    assert found.host_bytes.measured > 0
    assert found.host_bytes.predicted > 0
    later_s = found.steps_s[1:]
    assert min(later_s) <= found.step_s.measured <= max(later_s)
    eta = found.eta_s
    assert (eta.low, eta.high) == (min(later_s) * 50, max(later_s) * 50)
    shown = trial.table(found)
    assert "host memory" in shown
    assert "nothing was kept" in shown


def test_a_run_that_does_not_fit_says_so_and_leaves_nothing(
    run_config: MakeConfig, own_folders: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise DoesNotFit("needs 80 GiB and 24 GiB is free")

    monkeypatch.setattr(trial, "train", refuse)
    with pytest.raises(DoesNotFit):
        trial.dry_run(load_config(run_config()))
    assert list(own_folders.iterdir()) == []


def test_the_command_answers_in_json_and_tells_its_progress_on_standard_error(
    run_config: MakeConfig, own_folders: Path
) -> None:
    done = forked.python("-m", "fluxtrain", "dry-run", run_config(), "--json", "--steps", "4")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["steps"] == 4
    assert "step 4/4" in done.stderr
    assert list(own_folders.iterdir()) == []
