"""The terminal is stopped, continued, taken away, or takes nothing: the shell gets it back as it
was, the app comes back whole or ends, and the training never notices.
"""

from __future__ import annotations

import os
import re
import shlex
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import msgspec
import psutil
import pytest

from fluxtrain.events import events as ev
from fluxtrain.events.run_folder.run_dir import RunDir
from tests.tui.desk import TINY, Desk, Terminal

APP = (sys.executable, "-P", "-m", "fluxtui")
ENTERED = b"\x1b[?1049h"  # to the alternate screen


@pytest.fixture
def watched(desk: Desk, made: ModuleType) -> Path:
    """A run to look at."""
    run = desk.runs / "watched"
    made.write(run / "events.ndjson", made.training(20))
    return run


@pytest.fixture
def shell(desk: Desk) -> Terminal:
    """An interactive shell with job control in a terminal."""
    desk.environment |= {"PS1": "ready> ", "PS2": "more> "}
    terminal = desk.run(["bash", "--norc", "--noprofile", "--noediting", "-i"])
    terminal.until("ready>")
    return terminal


def command(terminal: Terminal, text: str) -> None:
    terminal.wiped()
    terminal.press(f"{text}\r")


def app_in(shell: Terminal) -> psutil.Process:
    """The app that was started from the shell, directly or by another program of the job."""
    below = psutil.Process(shell.process.pid).children(recursive=True)
    return next(one for one in below if "fluxtui" in one.cmdline()[2:4])


def until_stopped(process: psutil.Process, stopped: bool = True) -> None:
    deadline_s = time.monotonic() + 60
    while (process.status() == psutil.STATUS_STOPPED) is not stopped:
        assert time.monotonic() < deadline_s, process.status()
        time.sleep(0.05)


def shown_step(shell: Terminal) -> int:
    shown = re.search(r"step (\d+)/100000", shell.text)
    return int(shown[1]) if shown else 0


@pytest.mark.slow
def test_ctrl_z_gives_the_shell_a_sane_terminal_and_fg_the_app_with_the_numbers_of_now(
    desk: Desk, shell: Terminal
) -> None:
    sane = shell.mode()
    arguments = shlex.join([*APP, "--demo", "--steps", "100000", *TINY])
    command(shell, arguments)
    shell.until("RUNNING", "? help")
    shell.press("\x1a")
    shell.until("Stopped", "ready>")
    assert shell.mode() == sane
    assert desk.run_dir().liveness() == "running", "the trainer is no part of the shell's job"
    stopped_at = desk.run_dir().summary().step or 0
    later = stopped_at + 5
    while (desk.run_dir().summary().step or 0) < later:
        shell.read(0.1)
    shell.resize(100, 30)
    shell.wiped()
    command(shell, "fg")
    shell.until("RUNNING", "Buffers", "? help", "detach")
    deadline_s = time.monotonic() + 60
    while shown_step(shell) < later:  # what it had is drawn first
        assert time.monotonic() < deadline_s, shell.text
        shell.read(0.1)
    assert "RUNNING" in shell.screen.display[0], "drawn at its new size, from the first line"
    assert "detach" in shell.screen.display[29]
    shell.press("q")
    shell.until("goes on without the app", "ready>")
    assert shell.mode() == sane
    assert desk.run_dir().liveness() == "running"


def test_a_stop_from_outside_leaves_a_sane_terminal_after_the_app(
    shell: Terminal, watched: Path
) -> None:
    sane = shell.mode()
    command(shell, shlex.join([*APP, "--attach", str(watched)]))
    shell.until("step 20/200", "detach")
    app, threads = app_in(shell), list[int]()
    for _ in range(4):
        shell.wiped()
        app.send_signal(signal.SIGSTOP)
        shell.until_written(b"Stopped", b"ready>")
        command(shell, "fg")
        shell.until("step 20/200", "Buffers", "detach")
        threads.append(app.num_threads())
    shell.press("4")
    shell.until("Gradient norm")
    assert app.num_threads() <= threads[0] + 1, "one thread reads the keys, not one more each time"
    shell.press("q")
    shell.until("watched:", "ready>")
    assert shell.mode() == sane
    command(shell, "echo $((6*7))")
    shell.until("\n42")


@pytest.mark.parametrize("by_key", [True, False])
@pytest.mark.thinned(1)
def test_a_key_that_is_pressed_while_the_app_comes_back_is_the_apps(
    shell: Terminal, watched: Path, by_key: bool
) -> None:
    command(shell, shlex.join([*APP, "--attach", str(watched)]))
    shell.until("step 20/200", "detach")
    app = app_in(shell)
    for late_s in (0.0, 0.05, 0.1, 0.2):
        for key, seen in (("4", "Gradient norm"), ("1", "Buffers")):
            shell.wiped()
            if by_key:
                shell.press("\x1a")
            else:
                app.send_signal(signal.SIGSTOP)
            # A stop within a sequence makes the shell's words a part of that on the screen.
            shell.until_written(b"Stopped", b"ready>")
            command(shell, "fg")
            until_stopped(app, stopped=False)
            time.sleep(late_s)
            shell.press(key)
            shell.until(seen, "detach")
    shell.press("q")
    shell.until("watched:", "ready>")


def test_a_stop_that_no_shell_sees_leaves_the_terminal_as_it_was_before_the_app(
    desk: Desk, watched: Path
) -> None:
    terminal = desk.open("--attach", str(watched))
    sane = terminal.mode()
    terminal.until("step 20/200", "detach")
    assert terminal.mode() != sane
    terminal.process.send_signal(signal.SIGSTOP)
    until_stopped(psutil.Process(terminal.process.pid))
    terminal.wiped()
    terminal.process.send_signal(signal.SIGCONT)
    while ENTERED not in terminal.output:
        assert terminal.read(0.1)
    terminal.until("step 20/200", "Buffers", "detach")
    terminal.press("q")
    assert terminal.ends() == 0
    assert terminal.mode() == sane


def test_ctrl_z_stops_the_whole_job_of_the_shell(shell: Terminal, watched: Path) -> None:
    """As of `make run`: the shell waits for make."""
    inner = shlex.join([*APP, "--attach", str(watched)])
    command(shell, f"bash -c {shlex.quote(inner + '; echo left')}")
    shell.until("step 20/200", "detach")
    app = app_in(shell)
    shell.press("\x1a")
    shell.until("Stopped", "ready>")
    until_stopped(app)
    command(shell, "bg")
    time.sleep(1.0)
    shell.wiped()
    until_stopped(app)
    assert shell.read(0.5) and "Buffers" not in shell.text, "it draws over nobody's work"
    command(shell, "fg")
    shell.until("step 20/200", "Buffers")
    shell.press("q")
    shell.until("left", "ready>")


def test_where_no_shell_waits_ctrl_z_says_so_and_stops_nothing(desk: Desk, watched: Path) -> None:
    """As in `ssh -t host fluxtrain-tui --attach`, where nobody could continue it."""
    terminal = desk.open("--attach", str(watched))
    terminal.until("step 20/200", "detach")
    terminal.press("\x1a")
    terminal.until("no shell waits for this app: d leaves it")
    terminal.process.send_signal(signal.SIGTSTP)
    terminal.press("4")
    terminal.until("Gradient norm")


@pytest.mark.slow  # `told` is a part of test_a_training_outlives_the_apps_that_start_and_watch_it
@pytest.mark.parametrize("ignoring", [False, True], ids=["told", "untold"])
def test_an_app_whose_terminal_hangs_up_ends_and_the_training_goes_on(
    desk: Desk, ignoring: bool
) -> None:
    """`untold`: a parent that outlives the connection keeps the signal (SIGHUP) from the app."""
    arguments = [*APP, "--demo", "--steps", "100000", *TINY]
    if ignoring:
        arguments = ["bash", "-c", f"trap '' HUP; {shlex.join(arguments)}; sleep 600"]
    terminal = desk.run(arguments)
    terminal.until("RUNNING")
    app = psutil.Process(terminal.process.pid)
    if ignoring:
        app = app_in(terminal)
    trainer = psutil.Process(desk.trainer_pid())
    terminal.hang_up()
    began_s = time.monotonic()
    gone, _ = psutil.wait_procs([app], timeout=30)
    assert gone, "it still runs for a terminal that is gone"
    assert time.monotonic() - began_s < 30
    before = desk.run_dir().summary().step or 0
    deadline_s = time.monotonic() + 60
    while (desk.run_dir().summary().step or 0) < before + 3:
        assert trainer.is_running() and time.monotonic() < deadline_s
        time.sleep(0.1)


@pytest.mark.slow
def test_a_terminal_that_takes_nothing_keeps_the_app_from_nothing_and_is_drawn_anew_later(
    desk: Desk, watched: Path
) -> None:
    """Stopped output (ctrl-s in a multiplexer, a connection that hangs): nobody reads."""
    terminal = desk.open("--attach", str(watched), size=(200, 60))
    terminal.until("step 20/200", "detach")
    redraw_unread(terminal)
    terminal.press("4")
    terminal.until("Gradient norm", "Learning rate", "DEAD", "detach")
    assert "DEAD" in terminal.screen.display[0] and "detach" in terminal.screen.display[59]
    redraw_unread(terminal)
    terminal.process.send_signal(signal.SIGTERM)
    assert terminal.process.wait(60) is not None


def redraw_unread(terminal: Terminal) -> None:
    """Whole screens, each of a tenth of a megabyte, that nobody takes."""
    for turn in range(50):
        terminal.resize(200 - (turn + 1) % 2, 60)
        time.sleep(0.1)


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    reader, writer = os.pipe()
    yield reader, writer
    for end in (reader, writer):
        try:
            os.close(end)
        except OSError:
            continue


def test_what_changes_while_the_screen_is_laid_out_anew_reaches_the_terminal(
    desk: Desk, made: ModuleType
) -> None:
    run = RunDir(desk.runs / "watched")
    made.write(run.journal, made.stamped(made.training(8), time.time() - 5, 0.05))
    with run.lock(), open(run.journal, "ab") as journal:
        terminal = desk.open("--attach", str(run.path), size=(80, 24))
        terminal.until("RUNNING", "p pause", "d detach")
        paused = ev.PhaseChanged(phase="paused", wall_s=time.time())
        journal.write(msgspec.json.encode(paused) + b"\n")
        journal.flush()  # a line below the header comes, and everything moves down
        terminal.until("PAUSED", "p resumes", "p resume  ?", patience_s=20)
