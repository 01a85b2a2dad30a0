"""A run whose folder is renamed, deleted or taken while it trains."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fluxtrain.errors import EXIT_BAD_INPUT, BadInput
from fluxtrain.events import events as ev
from fluxtrain.events.run_folder import run_dir as run_directory
from fluxtrain.events.run_folder.run_dir import RunDir
from fluxtrain.train import final_model
from fluxtrain.train.loop import TrainingLoop
from fluxtrain.train.run import Run
from tests.engine.runs import MakeConfig, run, told
from tests.engine.test_background_checkpoints import MIB, held_to, slowly
from tests.engine.test_resume import assert_same_run

Happens = Callable[[], None]
SETTINGS: dict[str, Any] = {"train__steps": 6, "train__checkpoint_every": 2}


def after_step(monkeypatch: pytest.MonkeyPatch, step: int, happens: Happens) -> None:
    real = TrainingLoop._compute

    def compute(self: TrainingLoop[Any], clock: Any) -> Any:
        if self.state.step == step:
            happens()
        return real(self, clock)

    monkeypatch.setattr(TrainingLoop, "_compute", compute)
    monkeypatch.setattr(run_directory, "LOOK_PERIOD_S", 0.0)


def files(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


@pytest.mark.thinned(1)
@pytest.mark.parametrize("budget_bytes", [0, 64 * MIB], ids=["waits", "background"])
@pytest.mark.parametrize("when", ["loading", "a step", "the model is saved"])
def test_a_renamed_run_goes_on_where_it_is_and_leaves_the_next_run_alone(
    run_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    when: str, budget_bytes: int,
) -> None:  # fmt: skip
    config, old, new = run_config(**SETTINGS), tmp_path / "run", tmp_path / "renamed"
    held_to(monkeypatch, budget_bytes)
    run(config, tmp_path / "whole")
    theirs: dict[str, bytes] = {}

    def renamed() -> None:
        old.rename(new)
        shutil.copytree(tmp_path / "whole", old)  # the next run at the old path
        theirs.update(files(old))

    slowly(monkeypatch, 0.02)
    if when == "a step":
        after_step(monkeypatch, 3, renamed)
    elif when == "loading":
        real = Run._planned_for

        def planned(self: Run, *arguments: Any) -> Any:
            renamed()
            return real(self, *arguments)

        monkeypatch.setattr(Run, "_planned_for", planned)
    else:
        chosen = final_model.choose_final_weights

        def choose(*arguments: Any) -> int:
            renamed()
            return chosen(*arguments)

        monkeypatch.setattr(final_model, "choose_final_weights", choose)
    run(config, old)
    assert files(old) == theirs
    assert_same_run(tmp_path / "whole", new)
    result = json.loads((new / "result.json").read_text())
    assert result["exit_code"] == 0 and result["model"] == str(new / "model")
    said = [event.text for event in told(new, ev.LogWritten) if "was renamed" in event.text]
    assert said == [f"{old} was renamed: the run goes on in {new}"]
    assert {path.name for path in new.iterdir()} == {
        path.name for path in (tmp_path / "whole").iterdir()
    }
    assert RunDir(new).liveness() == "finished"


@pytest.mark.parametrize("again", [False, True], ids=["deleted", "another in its place"])
def test_a_deleted_run_ends_in_words_and_writes_nothing_into_another(
    run_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, again: bool
) -> None:
    run_dir = tmp_path / "run"

    def deleted() -> None:
        while run_dir.exists():  # a checkpoint is written there meanwhile
            shutil.rmtree(run_dir, ignore_errors=True)
        if again:
            run_dir.mkdir()
            (run_dir / "notes.txt").write_text("theirs")

    after_step(monkeypatch, 3, deleted)
    with pytest.raises(BadInput, match="was deleted, or moved to another disk") as raised:
        run(run_config(**SETTINGS), run_dir)
    assert raised.value.exit_code == EXIT_BAD_INPUT
    assert not hasattr(raised.value, "__notes__"), "its log is gone"
    assert (files(run_dir) == {"notes.txt": b"theirs"}) if again else not run_dir.exists()


def test_a_run_whose_folder_another_process_locked_ends_and_writes_no_record(
    run_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir, locks = RunDir(tmp_path / "run"), []

    def taken() -> None:
        run_dir.pid.unlink()
        locks.append(run_dir.lock())

    after_step(monkeypatch, 3, taken)
    with pytest.raises(BadInput, match="another process may use the folder"):
        run(run_config(**SETTINGS), run_dir.path)
    assert locks and not run_dir.error.exists() and not run_dir.model.exists()
