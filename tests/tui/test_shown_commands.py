"""The command that the wizard shows is the run: pasted into a shell it does the same."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest

from fluxtrain.config.schema import RunConfig, config_of, demo_config, validate
from fluxtrain.events.run_folder.run_dir import RunDir
from fluxtui.answers.answers import Answers, with_data, with_model
from fluxtui.answers.configuring import answers_from_config, configuration
from fluxtui.answers.launching import command_text
from fluxtui.wizard.pages import drawing

ODD = 'it\'s; a "$HOME" `x` & (b), {c: d} # [e] — ü'
LORA = {
    "method.name": "lora", "train.learning_rate": 1e-5, "train.epochs": 2,
    "method.targets": ["q_proj", "v_proj"],
}  # fmt: skip
SEEDED = Answers(settings={"train.steps": 3, "train.seed": 4})
QLORA = Answers(settings={"method.name": "qlora"})
HELD_OUT = Answers(settings={"data.held_out": 0.1})
ANSWERS = {
    "demo": Answers(settings=LORA),
    "file": with_data(with_model(SEEDED, f"/models/{ODD}"), f"/data/{ODD}.txt"),
    "hub": with_data(with_model(QLORA, "o/n"), "hf://datasets/o/n?split=train"),
    "several": with_data(HELD_OUT, ["a b.jsonl", {"path": "c.csv", "weight": 2.0}]),
    "overrides": Answers(
        data_source="path", data_path="/d.txt",
        overrides=("data.columns={text: my body}", "train.max_grad_norm=null"),
    ),
    "opened": answers_from_config(
        {"model": {"path": "o/n"}, "data": {"path": "/d.txt", "roles": {"a b": "user"}},
         "train": {"betas": [0.9, 0.95], "learning_rate": "2e-4"}}
    ),
    "longest": with_data(Answers(), "/" + "/".join(f"folder{i:02} 'x'" for i in range(30))),
}  # fmt: skip


def given(command: str, folder: Path) -> list[str]:
    """What a shell hands to `fluxtrain` for this text."""
    program = folder / "fluxtrain"
    program.write_text(f"#!{sys.executable}\nimport json, sys\nprint(json.dumps(sys.argv[1:]))\n")
    program.chmod(0o755)
    environment = {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}"}
    told = subprocess.run(
        ["bash", "-c", command], env=environment, cwd=folder, capture_output=True, check=True
    )
    arguments: list[str] = json.loads(told.stdout)
    return arguments


def config_by(arguments: list[str]) -> RunConfig:
    """The configuration that these arguments of `fluxtrain train` make."""
    assert arguments[0] == "train"
    settings = [b for a, b in pairwise(arguments) if a == "--set"]
    config = demo_config(settings) if "--demo" in arguments else config_of(settings)
    assert config is not None
    return config


@pytest.fixture
def path_has_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in which a shell looks for `fluxtrain`."""
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "fluxtrain").touch(mode=0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    return folder


@pytest.mark.parametrize("name", ANSWERS)
@pytest.mark.parametrize("width", [40, 76, 1000])
def test_a_shell_reads_the_shown_command_as_the_answers(
    name: str, width: int, path_has_it: Path
) -> None:
    answers = ANSWERS[name]
    shown = drawing.command(command_text(answers), width).plain
    if width > 40:
        assert all(len(line) <= width for line in shown.splitlines())
    config = config_by(given(shown, path_has_it))
    if answers.is_demo:
        assert (config.train.learning_rate, config.train.steps, config.train.epochs) == (
            1e-5, None, 2,
        )  # fmt: skip
        assert config.method.targets == ["q_proj", "v_proj"]
        return
    from fluxtrain.config.text import apply_overrides

    raw = apply_overrides(configuration(answers), list(answers.overrides))
    assert config == validate(raw)


def test_a_run_that_goes_on_and_an_output_folder_are_quoted(path_has_it: Path) -> None:
    resumed = Answers(start="resume", resume_run=f"/runs/{ODD}")
    assert given(command_text(resumed), path_has_it) == ["train", "--resume", f"/runs/{ODD}"]
    placed = given(command_text(Answers(settings={"run_folder": f"/out/{ODD}"})), path_has_it)
    assert placed[-2:] == ["--run-dir", f"/out/{ODD}"]


@pytest.mark.slow
def test_the_shown_command_trains(tmp_path: Path) -> None:
    """The real one, with a file and a folder whose names a shell must not read."""
    folder = tmp_path / "my runs; $(false) 'x'"
    folder.mkdir()
    data = folder / "tales & more.txt"
    data.write_text("\n<|endoftext|>\n".join(f"Once there was block {i}." for i in range(200)))
    answers = Answers(
        data_source="path", data_path=str(data),
        settings={
            "train.steps": 2, "data.sequence_length": 32, "train.batch_rows": 2,
            "data.held_out": 0, "train.evaluate_every": "end", "train.checkpoint_every": "end",
            "run_folder": str(folder / "out"),
        },
    )  # fmt: skip
    shown = drawing.command(command_text(answers), 76).plain
    environment = {
        **os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    told = subprocess.run(
        ["bash", "-c", shown],
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert told.returncode == 0, told.stderr
    run = RunDir(folder / "out")
    assert json.loads(run.result.read_text())["exit_code"] == 0
    assert run.summary().step == 2
