"""A run's folder that was made elsewhere is data: it runs no code, and it reads and writes only
its own files."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fluxtrain.cli import main
from fluxtrain.config.schema import demo_config
from fluxtrain.errors import BadInput
from fluxtrain.events.run_folder.own_files import clear_model, note_model
from fluxtrain.events.run_folder.run_dir import RunDir, list_runs
from fluxtrain.files.atomic import read_json
from fluxtrain.train.checkpoint.recovery import may_keep_tokens, resumed_config

Call = Callable[..., tuple[int, str]]
TRUSTING = {"path": "elsewhere/model", "trust_remote_code": True}


@pytest.fixture
def call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Call:
    """The command in this process: its exit code and what it said of an error."""
    monkeypatch.setenv("FLUXTRAIN_RUNS", str(tmp_path / "runs"))

    def run(*arguments: object) -> tuple[int, str]:
        capsys.readouterr()
        with pytest.raises(SystemExit) as caught:
            main([str(argument) for argument in arguments])
        said = capsys.readouterr()
        assert "Traceback" not in said.out + said.err
        return int(str(caught.value.code)), said.err

    return run


def a_run(folder: Path, /, **model: Any) -> RunDir:
    """A folder as a run leaves it, whose record has this model."""
    folder.mkdir(parents=True)
    run = RunDir(folder)
    run.journal.write_bytes(b"")
    config = demo_config().model_dump(mode="json")
    config["model"] |= model
    run.write_json(run.run, {"config": config})
    for inner in (run.model, run.checkpoints):
        inner.mkdir()
    (run.model / "config.json").write_text("{}")
    return run


# --- code -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("said", ["true", "yes", "on"])
def test_code_is_trusted_by_the_user_and_not_by_the_folder(tmp_path: Path, said: str) -> None:
    run = a_run(tmp_path / "run", **TRUSTING)
    with pytest.raises(BadInput) as refused:
        resumed_config(run, ["train.steps=7"])
    assert "wants to run Python code" in str(refused.value)
    assert "--set model.trust_remote_code=true" in str(refused.value)
    trusted = resumed_config(run, [f"model.trust_remote_code={said}", "train.steps=7"])
    assert trusted.model.trust_remote_code and trusted.train.steps == 7
    assert not resumed_config(run, ["model.trust_remote_code=false"]).model.trust_remote_code


@pytest.mark.parametrize("named", ["--resume RUN", "--resume auto --run-dir RUN", "--run-dir RUN"])
def test_the_command_refuses_code_that_only_the_folder_asks_for(
    call: Call, tmp_path: Path, named: str
) -> None:
    run = a_run(tmp_path / "run", **TRUSTING)
    before = sorted(os.listdir(run.path))
    code, said = call("train", *named.replace("RUN", str(run.path)).split())
    assert code == 2 and "add --set model.trust_remote_code=true" in said
    assert sorted(os.listdir(run.path)) == before, "nothing was written"


# --- places to write ------------------------------------------------------------------------------


def test_tokens_are_kept_where_the_user_says_and_not_where_the_folder_says(tmp_path: Path) -> None:
    run, place = a_run(tmp_path / "run"), tmp_path / "home"
    place.mkdir()
    content = json.loads(run.run.read_text())
    content["config"]["data"]["token_cache"] = str(place)
    run.write_json(run.run, content)
    with pytest.raises(BadInput, match=r"where none are yet.*add --set data.token_cache=FOLDER"):
        resumed_config(run, ["train.steps=7"])
    for told in ("auto", "off", str(place)):
        assert resumed_config(run, [f"data.token_cache={told}"]).data.token_cache == told
    entry = place / ("0" * 32)
    entry.mkdir()
    (entry / "used").touch()  # tokens are kept there since the run began
    assert resumed_config(run, []).data.token_cache == str(place)
    (entry / "precious").touch()
    assert not may_keep_tokens(str(place))
    with pytest.raises(BadInput, match="where none are yet"):
        resumed_config(run, [])


# --- links and special files ----------------------------------------------------------------------

FILES = ("run.json", "plan.json", "events.ndjson", "engine.log", "result.json", "error.json",
         "pid", "timeline.ring", "model-files.json")  # fmt: skip
FOLDERS = ("checkpoints", "model", "trackers", "tensorboard", "wandb")


def replaced(path: Path, kind: str, precious: Path) -> None:
    """Put something else in a path's place."""
    if path.is_dir():
        shutil.rmtree(path)
    path.unlink(missing_ok=True)
    if kind == "link":
        path.symlink_to(precious)
    elif kind == "pipe":
        os.mkfifo(path)
    else:
        path.symlink_to("/dev/zero")


@pytest.mark.parametrize("kind", ["link", "pipe", "device"])
@pytest.mark.parametrize("name", [*FILES, *FOLDERS])
@pytest.mark.thinned(7)
def test_no_reader_of_a_run_goes_through_a_link_or_waits_for_a_pipe(
    call: Call, tmp_path: Path, name: str, kind: str
) -> None:
    run = a_run(tmp_path / "runs" / "foreign")
    precious = tmp_path / "precious"
    source = run.path / name
    if name in FOLDERS:
        precious.mkdir()
        (precious / "step-00000009").mkdir()
        (precious / "config.json").write_text("{}")
    else:
        precious.write_bytes(source.read_bytes() if source.exists() else b'{"exit_code": 0}')
    before = sorted(precious.rglob("*")) if precious.is_dir() else precious.read_bytes()
    replaced(source, kind, precious)
    for words in (
        ("train", "--resume", run.path), ("evaluate", run.path), ("export", run.path),
        ("generate", run.path, "--prompt", "a"), ("train", "--demo", "--run-dir", run.path),
        ("trace", run.path),
    ):  # fmt: skip
        code, said = call(*words)
        assert code == 2 and "error: " in said and "Traceback" not in said, (words, said)
    assert all(one.saved_model is None or name != "model" for one in list_runs(run.path.parent))
    assert name in FOLDERS or read_json(source) is None
    after = sorted(precious.rglob("*")) if precious.is_dir() else precious.read_bytes()
    assert after == before


def test_others_files_in_a_model_that_is_saved_again_are_moved_and_told(tmp_path: Path) -> None:
    run = a_run(tmp_path / "run")
    told: list[str] = []
    note_model(run)
    (run.model / "notes.txt").write_text("mine")
    clear_model(run, told.append)
    assert os.listdir(run.model) == ["config.json"]
    assert (run.path / "kept-from-model" / "notes.txt").read_text() == "mine"
    assert len(told) == 1 and "is not of the run" in told[0] and "kept-from-model" in told[0]


def test_a_record_as_large_as_the_disk_is_no_record(tmp_path: Path) -> None:
    run = a_run(tmp_path / "run")
    os.truncate(run.run, 1 << 40)
    with pytest.raises(BadInput, match="no readable run.json"):
        resumed_config(run, [])
    run.run.write_text("[" * 300_000)
    with pytest.raises(BadInput, match="no readable run.json"):
        resumed_config(run, [])
