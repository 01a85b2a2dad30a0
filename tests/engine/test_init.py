"""`fluxtrain init` writes a file that is valid, planned and trained as it is."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from fluxtrain.cli import main
from fluxtrain.commands.preview import preview
from fluxtrain.commands.starter import COMMENTS
from fluxtrain.config.schema import RunConfig, load_config, settings
from fluxtrain.events.run_folder.run_dir import RunDir


def call(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    """The exit code of `fluxtrain ARGUMENTS`, and what it printed."""
    with pytest.raises(SystemExit) as ended:
        main([str(argument) for argument in arguments])
    told = capsys.readouterr()
    code = ended.value.code
    return (code if isinstance(code, int) else 0), told.out, told.err


def test_the_file_is_valid_and_says_nothing_but_defaults(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    code, out, _ = call(capsys, "init")
    assert code == 0 and "fluxtrain train run.yaml" in out
    text = (tmp_path / "run.yaml").read_text()
    assert load_config(tmp_path / "run.yaml") == RunConfig()
    raw = yaml.safe_load(text)
    keys = [f"{section}.{key}" for section, values in raw.items() for key in values]
    assert keys == list(COMMENTS) and len(keys) == 10
    assert {setting.key for setting in settings(RunConfig())} > set(keys)
    lines = [line for line in text.splitlines() if line.startswith("  ")]
    assert all("  # " in line and len(line) <= 120 for line in lines) and len(lines) == 10


def test_it_overwrites_nothing_and_says_what_is_wrong(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    there = tmp_path / "mine.yaml"
    there.write_text("mine")
    code, _, err = call(capsys, "init", there)
    assert (code, there.read_text()) == (2, "mine") and "stays as it is" in err
    code, _, err = call(capsys, "init", tmp_path)
    assert code == 2 and "is a folder: name a file" in err
    code, _, err = call(capsys, "init", tmp_path / "no" / "run.yaml")
    assert code == 2 and "make the folder first" in err
    code, _, err = call(capsys, "init", tmp_path / "x.yaml", "--data", tmp_path / "none.jsonl")
    assert code == 2 and "none.jsonl does not exist: check data.path" in err
    assert not (tmp_path / "x.yaml").exists()


@pytest.mark.parametrize("name", ["a: b.txt", "yes", "12", "it's [new] #1.txt", 'q"uote.txt'])
def test_any_name_of_a_file_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path(name).write_text("words\n" * 9)
    assert call(capsys, "init", "run.yaml", "--data", name, "--model", "owner/name")[0] == 0
    config = load_config("run.yaml")
    assert (config.data.path, config.model.path) == (name, "owner/name")


def test_what_it_writes_is_planned_and_trained(
    model_folder: Callable[..., Path], text_file: Path, tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    file = tmp_path / "run.yaml"
    model = model_folder("llama")
    assert call(capsys, "init", file, "--model", model, "--data", text_file)[0] == 0
    assert preview(load_config(file), None, None, tmp_path / "run").model.parameters > 10_000
    run = RunDir(tmp_path / "run")
    assert call(capsys, "train", file, "--run-dir", run.path, "--steps", 2)[0] == 0
    assert json.loads(run.result.read_text())["step"] == 2


def test_the_help_names_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert "init" in call(capsys, "--help")[1]
