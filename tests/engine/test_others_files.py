"""Files that others put into a run's folder while it trains outlive its end."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fluxtrain.errors import EXIT_BAD_INPUT, EXIT_NO_SPACE, BadInput, FluxTrainError, NoSpace
from fluxtrain.events import events as ev
from fluxtrain.events.run_folder.run_dir import RunDir
from fluxtrain.models.export import save_folder
from fluxtrain.train.session import Session
from tests.engine.runs import MakeConfig, run, told
from tests.engine.test_run_renamed import after_step

SETTINGS: dict[str, Any] = {"train__steps": 3, "train__evaluate_every": "end"}
THEIRS = b"theirs"


def a_file(path: Path) -> None:
    path.write_bytes(THEIRS)


def a_folder(path: Path) -> None:
    path.mkdir()
    (path / "notes.txt").write_bytes(THEIRS)


def a_link(path: Path) -> None:
    path.parent.with_name("theirs").write_bytes(THEIRS)
    path.symlink_to(path.parent.with_name("theirs"))


def is_theirs(path: Path) -> bool:
    return (path / "notes.txt" if path.is_dir() else path).read_bytes() == THEIRS


@pytest.mark.thinned(2)
@pytest.mark.parametrize("puts", [a_file, a_folder, a_link])
def test_what_stands_in_the_place_of_a_model_is_put_aside_and_that_is_said(
    run_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    puts: Callable[[Path], None],
) -> None:  # fmt: skip
    run_dir = tmp_path / "run"
    after_step(monkeypatch, 1, lambda: puts(run_dir / "model"))
    run(run_config(**SETTINGS), run_dir)
    place = run_dir / "kept-from-model" / ("notes.txt" if puts is a_folder else "model")
    assert is_theirs(place)
    (said,) = [
        event.text for event in told(run_dir, ev.LogWritten) if "not of the run" in event.text
    ]
    assert str(place) in said
    assert json.loads((run_dir / "result.json").read_text())["exit_code"] == 0
    assert (run_dir / "model" / "model.safetensors").is_file()
    assert (run_dir / "model-files.json").is_file()
    assert not list(run_dir.glob(".model-*"))


def test_the_own_model_and_records_of_a_run_are_replaced(
    run_config: MakeConfig, tmp_path: Path
) -> None:
    config, run_dir = run_config(**SETTINGS), tmp_path / "run"
    run(config, run_dir)
    before = {path.name for path in run_dir.iterdir()}
    run(config, run_dir, resume=str(run_dir))
    assert {path.name for path in run_dir.iterdir()} == before
    assert not [event for event in told(run_dir, ev.LogWritten) if "not of the run" in event.text]


@pytest.mark.parametrize("puts", [a_file, a_link])
def test_a_record_replaces_what_stands_in_its_place_and_follows_no_link(
    tmp_path: Path, puts: Callable[[Path], None]
) -> None:
    run_dir = RunDir(tmp_path / "run")
    with Session(run_dir) as session:
        session.begin_training()
        puts(run_dir.result)
    assert json.loads(run_dir.result.read_text())["exit_code"] == 0
    if puts is a_link:
        assert (tmp_path / "theirs").read_bytes() == THEIRS


@pytest.mark.parametrize(
    ("code", "kind", "exit_code"),
    [(errno.EACCES, BadInput, EXIT_BAD_INPUT), (errno.ENOSPC, NoSpace, EXIT_NO_SPACE)],
)
def test_a_run_whose_result_cannot_be_written_does_not_end_with_0(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    code: int, kind: type[FluxTrainError], exit_code: int,
) -> None:  # fmt: skip
    run_dir, real = RunDir(tmp_path / "run"), os.replace

    def replace(source: Path, target: Path) -> None:
        if Path(target).name == "result.json":
            raise OSError(code, os.strerror(code))
        real(source, target)

    monkeypatch.setattr(os, "replace", replace)
    with pytest.raises(kind, match="cannot write .*result.json") as raised, Session(run_dir) as one:
        one.begin_training()
    assert raised.value.exit_code == exit_code and not run_dir.result.exists()
    assert json.loads(run_dir.error.read_text())["exit_code"] == exit_code
    (failed,) = told(run_dir.path, ev.Failed)
    assert failed.exit_code == exit_code and not told(run_dir.path, ev.Done)


def test_what_comes_into_a_folder_while_it_is_saved_anew_is_kept(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "model"

    def write(made: Path) -> None:
        (made / "model.safetensors").write_bytes(b"ours")

    def write_late(made: Path) -> None:
        write(made)
        (folder / "notes.txt").write_bytes(THEIRS)

    for step in (write, write, write_late):
        save_folder(step, 4, folder)
    (kept,) = tmp_path.glob("kept-from-model-*")
    assert (kept / "model" / "notes.txt").read_bytes() == THEIRS
    assert os.listdir(folder) == ["model.safetensors"] and str(kept) in caplog.text
    assert {path.name for path in tmp_path.iterdir()} == {"model", kept.name}
