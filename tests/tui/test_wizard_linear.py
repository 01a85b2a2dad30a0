"""The wizard line by line: the same questions and answers, said once, without a screen."""

from __future__ import annotations

import json
import os
import pty
import select
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from fluxtrain.config.schema import demo_config, load_config
from fluxtrain.events.run_folder.run_dir import RunDir
from fluxtui import launch
from fluxtui.answers.answers import Answers
from fluxtui.answers.draft import load_draft, save_draft
from fluxtui.answers.launching import Attach, Launch
from fluxtui.wizard.linear import GREETING, LinearWizard

PATIENCE_S = 120.0


class Person:
    """Types answers in order, then only Enter; keeps what was said."""

    def __init__(self, folder: Path, answers: Sequence[str] = (), enter: bool = True) -> None:
        self.folder, self.said, self.prompts = folder, [], []  # type: ignore[var-annotated]
        self._answers, self._enter = list(answers), enter

    def ask(self, prompt: str) -> str:
        self.prompts.append(prompt)
        if self._answers:
            return self._answers.pop(0)
        if not self._enter:
            raise EOFError
        return ""

    def wizard(self, answers: Answers | None = None) -> LinearWizard:
        return LinearWizard(
            answers,
            self.folder / "runs",
            ask=self.ask,
            say=self.said.append,
            draft=self.folder / "draft.json",
            engine=(sys.executable, str(self.folder / "engine.py")),
        )


def test_enter_alone_starts_the_demo(folder: Path) -> None:
    person = Person(folder)
    outcome = person.wizard().run()
    assert isinstance(outcome, Launch)
    assert outcome.arguments == ("--demo",)
    assert person.said[0] == GREETING
    assert load_draft(folder / "draft.json") is None
    for line in (
        "trained on: So it is.<|end|>", "context: <|user|>Why?", "Full fits",
        "rates measured", "RAM: 2.00 MiB of 2.00 GiB, 2.00 GiB left",
    ):  # fmt: skip
        assert any(said.startswith(line) for said in person.said), line
    assert not any(mark in line for line in person.said for mark in "─━│┌▌█▸\x1b")


def test_the_same_answers_become_the_same_configuration(folder: Path) -> None:
    data = folder / "tales.txt"
    data.write_text("Once upon a time.\n")
    typed = [
        "1", "1",  # new; the demo's model
        "2", str(data), "",  # a file; the method
        "5", "9", "8", "64", "6", "16", "",  # nine steps of 16 rows of 64 tokens
        "", "4", "",  # the machine; fit; no setting
    ]  # fmt: skip
    person = Person(folder, typed)
    outcome = person.wizard().run()
    assert isinstance(outcome, Launch)
    config = load_config(outcome.arguments[0])
    assert (config.data.path, config.data.sequence_length) == (str(data), 64)
    assert (config.train.batch_rows, config.train.steps) == (16, 9)
    assert (config.placement.offload, config.placement.chunk_rows) == ("max", 1), "the plan `fit`"


def test_an_adapters_questions_are_asked_with_their_reasons(folder: Path) -> None:
    typed = [
        "1", "1", "1",  # new; the demo's model and data
        "3", "1", "8", "3", "q_proj v_proj", "4", "dora", "5", "nf4",  # qlora: its settings
    ]  # fmt: skip
    person = Person(folder, typed)
    outcome = person.wizard().run()
    assert isinstance(outcome, Launch)
    config = demo_config([one for one in outcome.arguments if "=" in one])
    method = config.method
    assert (method.name, method.rank, method.alpha) == ("qlora", 8, "auto")
    assert (method.targets, method.variant, method.base) == (["q_proj", "v_proj"], "dora", "nf4")
    assert any("1 rank: 16, rank of the adapters" in said for said in person.said)
    for title in ("Full", "LoRA", "QLoRA"):
        assert any(said.startswith(f"{title} fits: buffers") for said in person.said)


def test_a_wrong_answer_is_refused_and_asked_again(folder: Path) -> None:
    person = Person(folder, ["9", "x", "1", "3", "/no/such", "1", "", "1"])
    assert isinstance(person.wizard().run(), Launch)
    assert "error: '9' is no number from 1 to 4" in person.said
    assert "error: /no/such does not exist" in person.said


def test_unclear_columns_are_asked_for(folder: Path) -> None:
    (folder / "qa.csv").write_text("question,answer,response\nWhy?,So.,Not so.\n")
    person = Person(folder, ["", "", "2", str(folder / "qa.csv"), "2", "q"])
    assert person.wizard().run() is None
    draft = load_draft(folder / "draft.json")
    assert draft is not None and draft.settings["data.ignore"] == ["answer"]


def test_b_goes_back_and_loses_nothing(folder: Path) -> None:
    typed = ["1", "1", "1", "", "5", "9", "b", "2", "", "", "", ""]  # nine steps; another method
    person = Person(folder, typed)
    outcome = person.wizard().run()
    assert isinstance(outcome, Launch)
    assert {"train.steps=9", "method.name=lora"} <= set(outcome.arguments)


@pytest.mark.parametrize("leave", [["1", "q"], ["1"]])
def test_q_and_the_end_of_the_input_leave_with_the_answers_kept(
    folder: Path, leave: list[str]
) -> None:
    person = Person(folder, leave, enter=False)
    assert person.wizard(Answers(settings={"train.steps": 5})).run() is None
    kept = load_draft(folder / "draft.json")
    assert kept is not None and kept.settings["train.steps"] == 5
    assert not (folder / "runs").exists()


def test_unfinished_answers_are_offered(folder: Path) -> None:
    save_draft(Answers(settings={"train.steps": 5}, step="launch"), folder / "draft.json")
    person = Person(folder, ["y"])
    outcome = person.wizard().run()
    assert isinstance(outcome, Launch)
    assert "train.steps=5" in outcome.arguments
    save_draft(Answers(settings={"train.steps": 5}), folder / "draft.json")
    fresh = Person(folder, ["n"]).wizard().run()
    assert isinstance(fresh, Launch)
    assert fresh.arguments == ("--demo",)


def test_a_dry_run_says_measured_against_predicted(folder: Path) -> None:
    person = Person(folder, ["d", "y"])
    assert isinstance(person.wizard(Answers(step="launch")).run(), Launch)
    assert "host memory: predicted 2.00 MiB, measured 4.00 MiB, error -50%" in person.said
    assert "fluxtrain train --demo" in person.said


def test_a_plan_that_is_refused_leads_back(folder: Path) -> None:
    (folder / "plan.json").unlink()
    person = Person(folder, [""] * 12, enter=False)
    assert person.wizard(Answers(step="strategy")).run() is None
    assert "error: the model needs 80 GiB and 24 GiB is free" in person.said


def test_why_tells_every_reason(folder: Path) -> None:
    person = Person(folder, ["", "", "", "w"])
    assert isinstance(person.wizard(Answers(step="strategy")).run(), Launch)
    assert "train.batch_rows is 8: 1,024 tokens make a step" in person.said


def test_a_run_can_be_watched_and_gone_on_with(
    folder: Path, made: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = RunDir(folder / "runs" / "tales")
    run.path.mkdir(parents=True)
    run.run.write_text(json.dumps({"config": {"model": {"path": "demo"}}}))
    run.result.write_text(json.dumps({"exit_code": 130, "message": "stopped"}))
    watched = Person(folder, ["3", "1"]).wizard().run()
    assert watched == Attach(run_dir=run.path)
    person = Person(folder, ["2", "1"])
    outcome = person.wizard().run()
    assert isinstance(outcome, Launch)
    assert outcome.arguments == ("--resume", str(run.path))
    assert f"fluxtrain train --resume {run.path}" in person.said


# --- when it is used ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("environment", "lines"),
    [
        ({"TERM": "xterm"}, False),
        ({"TERM": "dumb"}, True),
        ({}, True),
        ({"TERM": "xterm", "ACCESSIBLE": "1"}, True),
        ({"TERM": "xterm", "ACCESSIBLE": "0"}, False),
    ],
)
def test_lines_are_wanted_where_somebody_is_asked_without_a_screen(
    environment: dict[str, str], lines: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("stdin", "stdout"):
        monkeypatch.setattr(f"sys.{name}.isatty", lambda: True, raising=False)
    assert launch.wants_lines(environment) is lines
    monkeypatch.setattr("sys.stdin.isatty", lambda: False, raising=False)
    assert not launch.wants_lines(environment), "a script is never asked"


@pytest.mark.slow
def test_a_tiny_run_from_the_first_question_to_its_end_on_a_dumb_terminal(tmp_path: Path) -> None:
    typed = _Typed(
        ["--steps", "3", "--set", "data.sequence_length=32", "--set", "train.batch_rows=2",
         "--set", "train.evaluate_every=end", "--set", "train.checkpoint_every=end"],
        {"TERM": "xterm", "ACCESSIBLE": "1", "FLUXTRAIN_RUNS": str(tmp_path / "runs"),
         "XDG_STATE_HOME": str(tmp_path / "state"), "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert typed.to_the_end() == 0, typed.text
    assert "\x1b" not in typed.text
    assert "Choose a model" in typed.text
    assert "trained on: " in typed.text
    assert "step 3/3" in typed.text
    assert "finished after step 3" in typed.text
    [run] = (tmp_path / "runs").iterdir()
    assert json.loads((run / "result.json").read_text())["exit_code"] == 0


class _Typed:
    """The command on a pseudo-terminal; Enter answers every question."""

    ENDS = ("]: ", "goes on: ", "again: ", "why: ", "YAML: ", "it: ")

    def __init__(self, arguments: list[str], environment: dict[str, str]) -> None:
        self._master, slave = pty.openpty()
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "fluxtui", *arguments],
            stdin=slave, stdout=slave, stderr=slave, env={**os.environ, **environment},
            start_new_session=True,
        )  # fmt: skip
        os.close(slave)
        self.text = ""

    def to_the_end(self) -> int:
        """The exit code; the command is ended where it says nothing more for too long."""
        answered, silent = 0, False
        while not silent:
            ready, _, _ = select.select([self._master], [], [], PATIENCE_S)
            silent = not ready
            try:
                data = os.read(self._master, 1 << 16) if ready else b""
            except OSError:  # EIO: the last process on the terminal has ended
                break
            self.text += data.decode(errors="replace")
            if self.text[answered:].endswith(self.ENDS):
                answered = len(self.text)
                os.write(self._master, b"\n")
        os.close(self._master)
        if silent:
            self._process.terminate()
        return self._process.wait(60)
