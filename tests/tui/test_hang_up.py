"""The terminal hangs up: every process that it ran ends, except a training."""

from __future__ import annotations

import os
import pty
import shlex
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from fluxtrain.events.run_folder.run_dir import RunDir
from tests.tui.desk import Desk, Terminal

APP = (sys.executable, "-P", "-m", "fluxtui")
NARROW = (80, 24)  # without the machine's load, so that the wizard draws nothing by itself
RESTORED = b"\x1b[?1049l"  # from the alternate screen


@pytest.fixture
def silent(desk: Desk, made: ModuleType) -> Iterator[Path]:
    """A run that lives and says nothing."""
    run = RunDir(desk.runs / "silent")
    made.write(run.journal, made.stamped(made.training(20), time.time() - 5, 0.05))
    with run.lock():
        yield run.path


def started(desk: Desk, *command: str, by: str = "terminal") -> Terminal:
    """The command in a terminal, which runs it itself, or a shell with job control, or make, as in
    a terminal opened for `make run`: make hears that the terminal hangs up, and waits."""
    if by == "shell":
        desk.environment["PS1"] = "ready> "
        terminal = desk.run(["bash", "--norc", "--noprofile", "--noediting", "-i"], NARROW)
        terminal.until("ready>")
        terminal.press(f"{shlex.join(command)}\r")
        return terminal
    if by == "make":
        makefile = desk.runs.parent / "Makefile"
        makefile.write_text(f"run:\n\t@exec {shlex.join(command)}\n".replace("$", "$$"))
        command = ("make", "-f", str(makefile))
    return desk.run(list(command), NARROW)


def until_all_ended(desk: Desk) -> None:
    """Wait until nothing runs in or below the terminals, and no training either."""
    deadline_s = time.monotonic() + 20
    while left := [one.info["cmdline"] for one in desk.processes()]:
        assert time.monotonic() < deadline_s, left
        time.sleep(0.05)


@pytest.mark.parametrize("by", ["terminal", "shell"])
@pytest.mark.thinned(1)
def test_the_wizard_ends_with_its_terminal(desk: Desk, by: str) -> None:
    terminal = started(desk, *APP, by=by)
    terminal.until("step 1 of 7")
    terminal.press("\r")
    terminal.until("step 2 of 7")
    terminal.hang_up()
    until_all_ended(desk)


def test_an_app_that_its_shell_has_stopped_ends_with_the_terminal(desk: Desk, silent: Path) -> None:
    terminal = started(desk, *APP, "--attach", str(silent), by="shell")
    terminal.until("step 20/200")
    terminal.press("\x1a")
    terminal.until_written(b"Stopped", b"ready>")
    terminal.hang_up()
    until_all_ended(desk)


@pytest.mark.parametrize("attached", [False, True], ids=["asking", "following"])
def test_plain_lines_end_with_their_terminal(desk: Desk, silent: Path, attached: bool) -> None:
    desk.environment |= {"ACCESSIBLE": "1", "TMPDIR": str(desk.runs.parent)}
    arguments = ("--attach", str(silent)) if attached else ()
    terminal = started(desk, *APP, *arguments, by="make")
    terminal.until("step 20/200" if attached else "What would you like to do?")
    terminal.hang_up()
    until_all_ended(desk)


def test_a_hang_up_that_is_only_signalled_restores_the_terminal(desk: Desk) -> None:
    terminal = started(desk, *APP)
    sane = terminal.mode()
    terminal.until("step 1 of 7")
    terminal.process.send_signal(signal.SIGHUP)
    assert terminal.ends() == 0
    assert terminal.mode() == sane
    assert RESTORED in terminal.output
    until_all_ended(desk)


def test_an_app_that_nobody_can_type_to_any_more_restores_its_screen(desk: Desk) -> None:
    """Its keys come from another terminal than the one that it draws on."""
    keyboard, keys = pty.openpty()
    try:
        terminal = started(desk, "sh", "-c", f"exec {shlex.join(APP)} < {os.ttyname(keys)}")
        terminal.until("step 1 of 7")
        os.close(keyboard)
        keyboard = -1
        assert terminal.ends() == 0
        assert RESTORED in terminal.output
        until_all_ended(desk)
    finally:
        os.close(keys)
        if keyboard >= 0:
            os.close(keyboard)
