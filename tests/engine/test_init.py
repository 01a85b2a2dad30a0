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
    assert (code, there.read_text()) == (2, "mine") and "is not overwritten" in err
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


def columns_of(file: Path) -> object:
    return yaml.safe_load(file.read_text())["data"].get("columns")


def test_columns_are_read_and_written_and_unclear_ones_refused_with_what_is_accepted(
    model_folder: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, file, clear, unclear = (
        model_folder("llama"), tmp_path / "run.yaml", tmp_path / "a.csv", tmp_path / "b.csv",
    )  # fmt: skip
    clear.write_text("Question,Answer\n" + "what is it,it is a fox\n" * 40)
    assert call(capsys, "init", file, "--model", model, "--data", clear)[0] == 0
    assert columns_of(file) == {"prompt": "Question", "completion": "Answer"}
    assert preview(load_config(file), None, None, tmp_path / "run").steps >= 1
    file.unlink()
    unclear.write_text("question,query,answer\n" + "one,two,three\n" * 40)
    command = ["init", file, "--model", model, "--data", unclear]
    code, _, err = call(capsys, *command)
    assert code == 2 and not file.exists()
    [first, _] = err.partition(": set ")[2].split(", or ")
    sets = [word for one in first.split(" with ") for word in ("--set", one.strip())]
    assert call(capsys, *command, *sets)[0] == 0
    assert columns_of(file) == {"prompt": "question", "completion": "answer"}
    assert list(load_config(file).data.ignore) == ["query"]
    preview(load_config(file), None, None, tmp_path / "run")


@pytest.mark.parametrize(
    ("name", "text", "told"),
    [
        ("a.jsonl", '{"messages": [{"role": "user", "content": "x"}]}\n', "role assistant"),
        ("a.csv", "question,answer\n", "has no rows"),
        ("a.pdf", "%PDF-1.4", "is a PDF"),
    ],
)
def test_data_that_a_run_cannot_use_writes_no_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, text: str, told: str
) -> None:
    (tmp_path / name).write_text(text)
    for model in ([], ["--model", "owner/name"]):
        code, _, err = call(capsys, "init", tmp_path / "r.yaml", "--data", tmp_path / name, *model)
        assert code == 2 and told in err and not (tmp_path / "r.yaml").exists()


def test_a_model_that_a_run_cannot_use_writes_no_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty").mkdir()
    code, _, err = call(capsys, "init", tmp_path / "run.yaml", "--model", tmp_path / "empty")
    assert code == 2 and "has no config.json" in err and not (tmp_path / "run.yaml").exists()


def test_the_help_names_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert "init" in call(capsys, "--help")[1]


@pytest.mark.parametrize("by_name", [True, False])
def test_a_base_model_gets_a_template_whose_turns_it_can_end(
    by_name: bool, model_folder: Callable[..., Path], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    folder = model_folder()
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    named = json.loads((folder / "tokenizer_config.json").read_text())
    named.pop("chat_template", None)
    (folder / "tokenizer_config.json").write_text(json.dumps(named))
    monkeypatch.chdir(folder.parent)
    Path("qa.csv").write_text("instruction,response\n" + "what is one,it is one thing\n" * 40)
    model = folder.name if by_name else folder
    code, out, err = call(capsys, "init", "run.yaml", "--model", model, "--data", "qa.csv")
    assert code == 0, out + err
    assert yaml.safe_load(Path("run.yaml").read_text())["data"]["chat_template"] == "chatml"
    code, out, err = call(capsys, "inspect", "run.yaml")
    assert code == 0, out + err
