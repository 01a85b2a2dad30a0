"""The whole path in a real pseudo-terminal: the app as a user runs it, with the real trainer.

Each test starts `fluxtrain-tui` on a terminal that a screen parser reads, presses keys, and looks
at what a user would see. The runs are tiny demo runs, so that each test stays below a minute.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import psutil
import pytest

from tests.engine.conftest import tiny_model, train_tokenizer
from tests.tui.desk import PATIENCE_S, TINY, Desk, Terminal

RESTORED = b"\x1b[?1049l"  # back from the alternate screen


@pytest.mark.slow  # many starts of the engine; test_wizard_flows.py has the way with a stand-in
@pytest.mark.timeout(600)
def test_from_a_table_to_a_merged_model_without_leaving_the_app(desk: Desk, tmp_path: Path) -> None:
    base, table = tmp_path / "little", tmp_path / "qa.csv"
    train_tokenizer(["What colour is box 1 of Alice? It is white."] * 20, base, 320)
    tiny_model("llama").save_pretrained(base)
    rows = [f"What colour is box {n} of Alice?,Box {n} is white." for n in range(200)]
    table.write_text("\n".join(["Question,Answer", *rows]) + "\n")
    terminal = desk.open(
        "--model", str(base), "--steps", "4", "--sequence-length", "64", size=(80, 24)
    )  # fmt: skip
    terminal.until("step 1 of 7")
    terminal.press("\r")
    terminal.until("step 2 of 7", "LlamaForCausalLM")
    terminal.press("\r")
    terminal.until("step 3 of 7", "Choose the data")
    terminal.press("\x1b[B")
    terminal.until("▸ File")
    terminal.press(str(table))
    terminal.until("As the model sees it", "completion")
    terminal.press("\r")
    terminal.until("step 4 of 7", "FITS")
    terminal.press("\x1b[C")
    terminal.until("▸ LoRA")
    for step in ("5 of 7", "6 of 7", "7 of 7"):
        terminal.press("\r")
        terminal.until(f"step {step}")
    terminal.until("Enter starts the training", "4 steps")
    terminal.press("\r")
    terminal.until("FINISHED", "4/4", "the adapter is in")
    terminal.press("m")
    terminal.until("Export", "enter write")
    terminal.press("\r")
    terminal.until("written", "checked")
    terminal.press("\r")
    terminal.press("q")
    assert terminal.ends() == 0
    assert RESTORED in terminal.output
    run = desk.run_dir()
    assert json.loads(run.result.read_text())["exit_code"] == 0
    assert (run.path / "merged" / "config.json").exists()
    kept = (run.path / "config.yaml").read_text()
    assert "steps: 4" in kept and "sequence_length: 64" in kept


@pytest.mark.slow  # three starts of the real engine; a way through the same pages as above
def test_an_own_file_from_a_configuration_is_planned_by_the_real_engine_and_trained(
    desk: Desk, tmp_path: Path
) -> None:
    data = tmp_path / "tales.txt"
    tales = (f"Once upon a time there was block {number} that streamed." for number in range(200))
    data.write_text("\n<|endoftext|>\n".join(tales))
    config = tmp_path / "tales.yaml"
    config.write_text(
        f"model: {{path: demo}}\ndata: {{path: {data}, sequence_length: 32, held_out: 0}}\n"
        "train: {batch_rows: 2, evaluate_every: end, checkpoint_every: end}\n"
    )
    terminal = desk.open(str(config), "--steps", "3")
    terminal.until("step 6 of 7", "Chosen for you: why?", "train.batch_rows")
    for number in (5, 4, 3):
        terminal.press("\x1b")
        terminal.until(f"step {number} of 7")
    terminal.until("✓ format", "200 documents", "sample 1:", "▌ ce upon a time")
    for number in (4, 5, 6, 7):
        terminal.press("\r")
        terminal.until(f"step {number} of 7")
    terminal.until("sequence_length: 32")
    terminal.press("\r")
    terminal.until("FINISHED", "3/3")
    terminal.press("q")
    assert terminal.ends() == 0
    kept = (desk.run_dir().path / "config.yaml").read_text()
    assert "steps: 3" in kept
    assert "sequence_length: 32" in kept


def test_an_answer_that_the_engine_refuses_is_told_in_the_wizard(
    desk: Desk, tmp_path: Path
) -> None:
    config = tmp_path / "c.yaml"
    config.write_text("model: {path: /no/such/model}\n")
    terminal = desk.open(str(config), size=(80, 24))
    terminal.until("step 6 of 7", "✗", "/no/such/model")
    assert "Traceback" not in terminal.text


def test_answers_survive_a_killed_wizard(desk: Desk) -> None:
    first = desk.open(size=(80, 24))
    first.until("What would you like to do?")
    first.press("\r")
    first.until("Choose a model")
    first.press("\x1b[B\x1b[B")  # down, down
    first.until("▸ Folder")
    first.press("/models/mine")
    first.until("/models/mine does not exist")
    first.process.kill()
    first.process.wait()
    second = desk.open(size=(80, 24))
    second.until("Unfinished answers", "/models/mine")
    second.press("\r")
    second.until("step 2 of 7", "▸ Folder", "/models/mine does not exist")


@pytest.mark.slow
def test_a_killed_trainer_is_seen_by_the_app(desk: Desk) -> None:
    terminal = desk.open("--demo", "--steps", "100000", *TINY)
    terminal.until("RUNNING")
    os.kill(desk.trainer_pid(), signal.SIGKILL)
    terminal.until("DEAD")
    terminal.press("q")
    assert terminal.ends() == 0
    assert "dead" in terminal.text


@pytest.mark.slow
def test_a_killed_app_leaves_the_trainer_running_to_its_end(desk: Desk) -> None:
    terminal = desk.open("--demo", "--steps", "60", *TINY)
    terminal.until("RUNNING")
    terminal.process.kill()
    terminal.process.wait()
    desk.until_state("finished")
    assert desk.run_dir().summary().step == 60


CRASH = """
import sys
from fluxtui import app, launch
def crash(self):
    raise RuntimeError("a bug in a panel")
app.FluxApp.redraw = crash
sys.exit(launch.main(sys.argv[1:]))
"""


def hung_up(terminal: Terminal) -> None:
    """Let the terminal of an app go away once its training runs, and wait for the app's end."""
    terminal.until("RUNNING")
    terminal.hang_up()
    terminal.process.wait(30)


def killed_and_resumed(desk: Desk) -> Terminal:
    """An app that sees its trainer die, and starts it again from the list."""
    terminal = desk.open("--attach", "last")
    terminal.until("checkpoint of")
    killed = desk.trainer_pid()
    os.kill(killed, signal.SIGKILL)
    terminal.until("DEAD")
    terminal.press("7")
    terminal.until("r resume", "dead  ")  # the list has been read, and the run is not there alive
    terminal.press("r")
    terminal.until("Resume ", "checkpoint", "y resume")
    terminal.press("y")
    terminal.until("RUNNING")
    assert desk.trainer_pid() != killed
    return terminal


def test_a_training_outlives_the_apps_that_start_and_watch_it(desk: Desk) -> None:
    """One training, as its start takes seconds: the terminal of the app that starts it hangs up,
    another app crashes, others come and go, it is killed and resumed from the list, and stopped."""
    often = ("--set", "train.checkpoint_every=2")
    hung_up(desk.open("--demo", "--steps", "100000", *TINY, *often))
    before, name = desk.run_dir().summary().step or 0, desk.run_dir().run_id

    crashing = desk.run([sys.executable, "-P", "-c", CRASH, "--attach", name])
    assert crashing.ends() == 1
    assert RESTORED in crashing.output
    assert "a bug in a panel" in crashing.text
    assert "--attach" in crashing.text, "it says how to see the run again"
    assert (desk.run_dir().summary().step or 0) > before
    assert desk.run_dir().liveness() == "running"

    terminated = desk.open("--attach", name, size=(80, 24))
    terminated.until("RUNNING")
    terminated.process.send_signal(signal.SIGTERM)
    assert terminated.ends() == 0
    assert RESTORED in terminated.output, "a terminated app restores the terminal"
    assert desk.run_dir().liveness() == "running"

    resuming = killed_and_resumed(desk)
    watching = desk.open("--attach", "last", "--read-only", size=(80, 24))
    watching.until("READ-ONLY", "RUNNING")
    watching.press("Q")
    watching.until("read-only")
    resuming.press("d")
    assert resuming.ends() == 0
    assert f"fluxtrain-tui --attach {name}" in resuming.text
    assert desk.run_dir().liveness() == "running", "detaching leaves the training alone"
    watching.press("q")
    assert watching.ends() == 0

    stopping = desk.open("--attach", "last")
    stopping.until("RUNNING")
    stopping.press("Q")
    stopping.until("Stop this run?")
    stopping.press("y")
    stopping.until("STOPPED")
    stopping.press("q")
    assert stopping.ends() == 0
    assert desk.run_dir().liveness() == "stopped"
    assert list(desk.run_dir().checkpoints.glob("step-*")), "a stopped run has its checkpoint"


HANGING = """
import sys, threading
from fluxtrain.events.run_folder.run_dir import RunDir
from fluxtui import launch
from fluxtui.sources.journal import JournalSource
polls = []
def hang(*_):
    polls.append(1)
    if len(polls) > 1:
        open(sys.argv[2] + "/hangs", "w").close()
        threading.Event().wait()
    return poll(*_)
poll, JournalSource.poll = JournalSource.poll, hang
def summed_up(self):
    return threading.Event().wait() if len(polls) > 1 else summary(self)
summary, RunDir.summary = RunDir.summary, summed_up
sys.exit(launch.main(sys.argv[1:]))
"""


def test_a_file_system_that_never_answers_again_keeps_nobody_from_leaving(
    desk: Desk, made: ModuleType
) -> None:
    run = desk.runs / "stuck"
    made.write(run / "events.ndjson", made.training(20))
    terminal = desk.run([sys.executable, "-P", "-c", HANGING, "--attach", str(run)])
    terminal.until("step 20/200")
    while not (run / "hangs").exists():
        terminal.read(0.1)
    terminal.press("q")
    assert terminal.ends() == 0
    assert RESTORED in terminal.output
    assert "does not answer" in terminal.text


def test_a_trainer_that_ends_before_its_first_word_is_seen_by_the_app(desk: Desk) -> None:
    terminal = desk.open("--demo", "--set", "train.no_such=1")
    terminal.until("DEAD", "no_such")


TEXTUAL = [sys.executable, "-c", "import textual.app, textual.screen"]


def cpu_s(usage: resource.struct_rusage) -> float:
    return usage.ru_utime + usage.ru_stime


@pytest.mark.slow
def test_the_first_paint_costs_little_more_than_the_import_of_textual(
    desk: Desk, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """In processor time, as other tests share this machine; modules are compiled once before."""
    for environment in (desk.environment, os.environ):
        monkeypatch.setitem(environment, "PYTHONPYCACHEPREFIX", str(tmp_path / "compiled"))
        monkeypatch.delitem(environment, "PYTHONDONTWRITEBYTECODE", raising=False)

    def first_paint_cpu_s() -> float:
        terminal = desk.open()
        terminal.until("What would you like to do?")
        times = psutil.Process(terminal.process.pid).cpu_times()
        terminal.press("\x1b")
        assert terminal.ends() == 0
        return float(times.user + times.system)

    def import_cpu_s() -> float:
        before = cpu_s(resource.getrusage(resource.RUSAGE_CHILDREN))
        subprocess.run(TEXTUAL, check=True)
        return cpu_s(resource.getrusage(resource.RUSAGE_CHILDREN)) - before

    pairs = [(first_paint_cpu_s(), import_cpu_s()) for _ in range(4)][1:]
    paints_s, imports_s = zip(*pairs, strict=True)
    # 1.4 to 1.72 were seen on machines of two cores, idle and busy; torch alone would cost ten.
    assert min(paints_s) < 3.5 * min(imports_s), (paints_s, imports_s)


@pytest.mark.slow
def test_without_a_terminal_the_demo_trains_in_lines_and_names_the_app(desk: Desk) -> None:
    environment = {**desk.environment, "TERM": "dumb"}
    done = subprocess.run(
        [sys.executable, "-P", "-m", "fluxtui", "--steps", "2", *TINY],
        env=environment,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "`fluxtrain-tui` in a terminal" in done.stderr
    assert "step 2/2" in done.stdout
    assert "\x1b" not in done.stdout


def test_a_headless_run_of_a_bad_configuration_ends_with_code_2(desk: Desk, tmp_path: Path) -> None:
    config = tmp_path / "c.yaml"
    config.write_text("data: {path: /no/such.txt}\n")
    done = subprocess.run(
        [sys.executable, "-P", "-m", "fluxtui", "--headless", str(config)],
        env=desk.environment,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.returncode == 2
    assert "/no/such.txt" in done.stderr
    assert "Traceback" not in done.stderr
