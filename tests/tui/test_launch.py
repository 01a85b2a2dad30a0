"""The `fluxtrain-tui` command: what it makes of its arguments, and life without a terminal."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import types
from pathlib import Path
from typing import Any

import pytest

from fluxtrain.errors import EXIT_BAD_INPUT, BadInput
from fluxtrain.events.emitter import Emitter
from fluxtrain.events.events import Done, Failed, Hello, StepFinished
from fluxtrain.events.run_folder.run_dir import RunDir
from fluxtrain.events.typed import typed
from fluxtui import launch
from fluxtui.answers.answers import Answers
from fluxtui.command_line import answers_of, make_parser
from fluxtui.headless import follow_lines

HELLO = Hello(
    run_id="r", run_dir="r", pid=1, pid_start_s=0.0, version="0", model="demo", method="full",
    dtype="float32", device="cpu", machine="", blocks=1, parameters=1, trained_parameters=1,
    total_steps=4,
)  # fmt: skip
STEP = StepFinished(
    step=3, total_steps=4, epoch=0.5, loss=2.5, learning_rate=1e-3, grad_norm=None, tokens=10,
    total_tokens=30, step_s=0.1, tokens_per_s=100.0, phases_s={}, stalls_s={}, eta_s=90.0,
)  # fmt: skip
DONE = Done(
    exit_code=0, step=4, seconds=61.0, loss=2.4, evaluation_loss=None, model_path="m"
)  # fmt: skip


def make_run(root: Path, name: str, *events: Any) -> RunDir:
    run = RunDir(root / name)
    run.path.mkdir(parents=True)
    emitter = Emitter(run.journal)
    for event in (HELLO, *events):
        emitter.emit(event)
    emitter.close()
    return run


def options(*arguments: str) -> Any:
    return make_parser().parse_args(arguments)


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FLUXTRAIN_RUNS", str(tmp_path / "runs"))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return tmp_path / "runs"


def test_without_arguments_the_wizard_decides() -> None:
    assert answers_of(options()) is None


def test_every_answer_is_a_flag(tmp_path: Path) -> None:
    given = ("--model", "o/n", "--data", "/d.txt", "--offload", "max", "--steps", "5",
             "--aggressiveness", "fit", "--method", "full",
             "--sequence-length", "64", "--batch-rows", "8", "--chunk-rows", "2")  # fmt: skip
    answers = answers_of(options(*given, "--set", "train.seed=1"))
    assert answers == Answers(
        model_source="hub",
        model_hub="o/n",
        data_source="path",
        data_path="/d.txt",
        dial="fit",
        settings={
            "train.steps": 5,
            "train.batch_rows": 8,
            "data.sequence_length": 64,
            "placement.chunk_rows": 2,
            "placement.offload": "max",
        },
        overrides=("train.seed=1",),
    )


def test_flags_win_over_the_configuration_file(tmp_path: Path) -> None:
    config = tmp_path / "c.yaml"
    config.write_text("model: {path: o/n}\ntrain: {steps: 3, seed: 9}\n")
    answers = answers_of(options(str(config), "--steps", "5"))
    assert answers is not None
    assert (answers.model_hub, answers.settings.get("train.steps"), answers.step) == (
        "o/n",
        5,
        "strategy",
    )
    assert answers.settings["train.seed"] == 9


@pytest.mark.parametrize(
    ("text", "said"),
    [("modle: {}\n", "model"), ("train: {steps: 0}\n", "train.steps"), ("a: [\n", "YAML")],
)
def test_a_bad_configuration_is_one_line_and_code_2(
    text: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], root: Path
) -> None:
    (tmp_path / "c.yaml").write_text(text)
    assert launch.main([str(tmp_path / "c.yaml")]) == 2
    errors = capsys.readouterr().err
    assert said in errors
    assert errors.count("\n") == 1
    assert not root.exists(), "nothing was started"


def test_a_missing_configuration_is_code_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert launch.main(["/no/such.yaml"]) == 2
    assert "/no/such.yaml" in capsys.readouterr().err


def test_a_theme_that_is_not_there_is_code_2_also_without_a_screen(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert launch.main(["--theme", "nope", "--headless", "--demo"]) == 2
    said = capsys.readouterr().err
    assert "there is no theme 'nope'" in said and "flux-dark" in said


def test_a_run_is_found_by_id_beginning_path_and_as_the_last(root: Path) -> None:
    first = make_run(root, "20260101-000000-tales")
    second = make_run(root, "20260102-000000-demo")
    os.utime(first.journal, (1.0, 1.0))
    assert launch.find_run("20260101-000000-tales") == first.path
    assert launch.find_run("20260101") == first.path
    assert launch.find_run(str(first.path)) == first.path
    assert launch.find_run("last") == second.path
    with pytest.raises(BadInput, match="several runs"):
        launch.find_run("2026010")


def test_last_is_the_newest_that_trains_and_without_one_the_newest_which_is_said(
    root: Path,
) -> None:
    trains = make_run(root, "20260101-000000-tales", STEP)
    newer = make_run(root, "20260102-000000-demo", STEP, DONE)
    os.utime(trains.journal, (1.0, 1.0))
    found, said = launch.newest_training()
    assert found == newer.path and "no run trains now" in said and "20260102-000000-demo" in said
    assert "finished" in said
    with trains.lock():
        assert launch.newest_training() == (trains.path, "")


def test_an_unknown_run_is_code_2_with_the_nearest_names(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_run(root, "20260101-000000-tales")
    assert launch.main(["--attach", "20260101-000000-tails"]) == 2
    assert "20260101-000000-tales" in capsys.readouterr().err
    assert launch.main(["--attach", str(root)]) == 2, "a folder that is no run"
    assert launch.main(["--attach", "y" * 300]) == 2, "a name that no folder can have"


@pytest.mark.parametrize("term", ["dumb", ""])
def test_a_terminal_that_cannot_draw_is_none(term: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("stdin", "stdout", "stderr"):
        monkeypatch.setattr(f"sys.{name}.isatty", lambda: True, raising=False)
    assert launch.has_terminal({"TERM": "xterm"})
    assert not launch.has_terminal({"TERM": term})
    assert not launch.has_terminal({})


@pytest.mark.parametrize(("encoding", "app"), [("utf-8", True), ("UTF8", True), ("latin-1", False)])
def test_a_terminal_of_another_character_set_gets_lines(
    monkeypatch: pytest.MonkeyPatch, encoding: str, app: bool
) -> None:
    for name in ("stdin", "stdout", "stderr"):
        end = types.SimpleNamespace(isatty=lambda: True, encoding=encoding)
        monkeypatch.setattr(sys, name, end)
    assert launch.has_terminal({"TERM": "xterm"}) is app
    assert launch.wants_lines({"TERM": "xterm"}) is not app


def test_leaving_says_how_to_come_back(root: Path) -> None:
    run = make_run(root, "tales", STEP)
    with run.lock():
        said = launch.farewell(run.path)
    assert "goes on" in said
    assert said.endswith("fluxtrain-tui --attach tales")


@pytest.mark.parametrize(
    ("found", "inside", "said"),
    [
        (True, True, "fluxtrain-tui"),
        (False, True, "'en v/bin/fluxtrain-tui'"),
        (False, False, "'{}/en v/bin/fluxtrain-tui'"),
    ],
)
def test_a_command_is_told_as_it_can_be_typed(
    *, found: bool, inside: bool, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "en v" / "bin" / "fluxtrain-tui"
    script.parent.mkdir(parents=True)
    script.touch(mode=0o755)
    monkeypatch.setattr(sys, "executable", str(script.parent / "python"))
    monkeypatch.setenv("PATH", str(script.parent if found else tmp_path))
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path if inside else tmp_path / "elsewhere")
    assert typed("fluxtrain-tui") == said.format(tmp_path)
    script.unlink()
    assert typed("fluxtrain-tui") == "fluxtrain-tui"


def test_leaving_a_finished_run_says_how_it_ended(root: Path, tmp_path: Path) -> None:
    run = make_run(root, "tales", STEP, DONE)
    assert "tales: finished after step 3. " in launch.farewell(run.path)
    run.result.write_text('{"exit_code": 0, "message": "finished"}')
    assert "tales: finished after step 3. " in launch.farewell(run.path)
    run.result.write_text('{"exit_code": 130, "message": "stopped after step 3: all is well"}')
    assert "tales: stopped after step 3: all is well. " in launch.farewell(run.path)
    failed = Failed(exit_code=3, kind="DoesNotFit", message="needs 80 GiB")
    elsewhere = make_run(tmp_path / "other", "big", STEP, failed)
    said = launch.farewell(elsewhere.path)
    assert "needs 80 GiB" in said
    assert str(elsewhere.path) in said, "a run outside the runs folder is named by its path"


def test_a_run_is_followed_in_lines_to_its_exit_code(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_run(root, "tales", STEP, Failed(exit_code=4, kind="Diverged", message="nan"), DONE)
    assert follow_lines(run.path) == 4
    assert "step 3/4" in capsys.readouterr().out


def test_a_run_whose_trainer_vanished_is_told_so(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_run(root, "tales", STEP)
    assert follow_lines(run.path) == 137
    assert "gone without a word" in capsys.readouterr().err


def without_a_terminal(root: Path, *arguments: str, **environment: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "fluxtui", *arguments],
        env={**os.environ, "FLUXTRAIN_RUNS": str(root), **environment}, text=True,
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


def test_without_a_terminal_nothing_is_trained_that_nobody_named(root: Path) -> None:
    opened = without_a_terminal(root)
    said = opened.communicate(timeout=60)[1]
    assert opened.returncode == 2 and "--demo" in said
    assert not list(root.glob("*"))


@pytest.mark.parametrize("over_ssh", [False, True])
def test_attaching_without_a_terminal_prints_lines_and_says_what_shows_the_app(
    root: Path, over_ssh: bool
) -> None:
    make_run(root, "tales", STEP, DONE)
    environment = {"SSH_CONNECTION": "10.0.0.1 5 10.0.0.2 22"} if over_ssh else {}
    lines, said = without_a_terminal(root, "--attach", **environment).communicate(timeout=60)
    assert "step 3/4" in lines and "\x1b" not in lines
    assert "no terminal here: lines instead of the app" in said
    assert ("`ssh -t HOST fluxtrain-tui --attach`" in said) is over_ssh


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir], ids=["pipe", "folder"])
def test_a_journal_that_is_no_file_is_told_without_a_terminal(make: Any, root: Path) -> None:
    run = make_run(root, "tales", STEP)
    run.journal.unlink()
    make(run.journal)
    follower = without_a_terminal(root, "--attach")
    _, said = follower.communicate(timeout=60)
    assert follower.returncode == EXIT_BAD_INPUT
    assert f"{run.journal} cannot be read: not a regular file" in said and "Traceback" not in said


def test_a_reader_of_the_lines_that_leaves_is_no_error(root: Path) -> None:
    run = make_run(root, "tales", STEP)
    with run.lock(), without_a_terminal(root, "--attach") as follower:
        assert follower.stdout is not None and follower.stderr is not None
        assert "step 3/4" in follower.stdout.readline()
        follower.stdout.close()
        emitter = Emitter(run.journal)
        emitter.emit(STEP)
        emitter.close()
        assert follower.wait(60) == 0
        assert "Traceback" not in follower.stderr.read()


# --- the trainer in the foreground ----------------------------------------------------------------

FOREGROUND = """
import sys
from fluxtui.headless import train_in_foreground
sys.exit(train_in_foreground([], [sys.executable, "-c", sys.argv[1]]))
"""


def foreground(trainer: str, *, first: str = "") -> subprocess.Popen[str]:
    """A stand-in trainer run by the real foreground code, in a process of its own, which executes
    `first` before."""
    return subprocess.Popen(
        [sys.executable, "-c", f"{first}\n{FOREGROUND}", textwrap.dedent(trainer)],
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


@pytest.mark.parametrize("code", [0, 2, 3, 5, 143])
def test_headless_ends_with_the_trainers_exit_code(code: int) -> None:
    assert foreground(f"raise SystemExit({code})").wait(120) == code


def test_headless_ends_with_128_and_the_signal_of_a_killed_trainer() -> None:
    process = foreground("import os, signal; os.kill(os.getpid(), signal.SIGKILL)")
    assert process.wait(120) == 128 + signal.SIGKILL


@pytest.mark.parametrize(
    ("sent", "received"), [("SIGINT", "SIGINT"), ("SIGTERM", "SIGTERM"), ("SIGHUP", "SIGTERM")]
)
def test_a_signal_reaches_the_trainer_once_and_it_may_take_its_time(
    sent: str, received: str
) -> None:
    process = foreground("""
        import signal, sys, time
        seen = []
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, lambda n, f: seen.append(signal.Signals(n).name))
        print("ready", flush=True)
        while not seen:
            time.sleep(0.01)
        time.sleep(0.3)  # writes its checkpoint
        print(*seen, flush=True)
        sys.exit(130)
    """)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.Signals[sent])
    assert process.stdout.readline() == f"{received}\n"
    assert process.wait(120) == 130


def test_a_terminal_that_goes_ends_nothing_that_was_started_to_outlive_it() -> None:
    trainer = """
        import signal
        waited = {signal.SIGINT, signal.SIGTERM}
        signal.pthread_sigmask(signal.SIG_BLOCK, waited)
        print("ready", flush=True)
        came = {signal.sigwait(waited), *signal.sigpending()}
        print(*sorted(signal.Signals(number).name for number in came), flush=True)
    """
    nohup = "import signal; signal.signal(signal.SIGHUP, signal.SIG_IGN)"
    process = foreground(trainer, first=nohup)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGHUP)
    process.send_signal(signal.SIGINT)
    assert process.stdout.readline() == "SIGINT\n"
    assert process.wait(120) == 0
