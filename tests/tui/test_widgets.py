"""The widgets in small apps of their own, and the app in a real terminal."""

from __future__ import annotations

import asyncio
import base64
import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
from textual.app import App, ComposeResult

from fluxtui.themes import PLAIN
from fluxtui.widgets.scrolling import ScrollingLines
from fluxtui.widgets.spans import line

ROWS = [line((f"row {i:03}", "text")) for i in range(100)]


class ListApp(App[None]):
    """A list of a hundred rows, and what it said."""

    def __init__(self, cursor: bool) -> None:
        super().__init__()
        self.list = ScrollingLines(cursor=cursor)
        self.chosen: list[int] = []
        self.at_end: list[bool] = []

    def compose(self) -> ComposeResult:
        yield self.list

    def on_mount(self) -> None:
        self.list.focus()
        self.call_after_refresh(self.list.show_all, ROWS, PLAIN)

    def on_scrolling_lines_chosen(self, event: ScrollingLines.Chosen) -> None:
        self.chosen.append(event.index)

    def on_scrolling_lines_scrolled(self, event: ScrollingLines.Scrolled) -> None:
        self.at_end.append(event.at_end)


async def shown(app: ListApp) -> None:
    """Wait for the first rows."""
    async with asyncio.timeout(60):
        while not app.list.text.strip():
            await asyncio.sleep(0.01)


async def test_a_list_scrolls_within_its_ends() -> None:
    app = ListApp(cursor=False)
    async with app.run_test(size=(30, 10)) as pilot:
        await shown(app)
        assert app.list.text.splitlines()[0] == "row 000"
        await pilot.press("up", "k", "pageup")
        assert app.list.offset_rows == 0
        await pilot.press("down", "j", "pagedown")
        assert app.list.offset_rows == 2 + 9
        await pilot.press("end", "down")
        assert app.list.text.splitlines()[-1] == "row 099"
        assert app.at_end[-1]
        await pilot.press("up")
        assert not app.at_end[-1]
        await pilot.press("enter")
        assert app.chosen == []  # without a cursor nothing can be chosen


async def test_the_cursor_stays_in_view_and_enter_chooses_its_row() -> None:
    app = ListApp(cursor=True)
    async with app.run_test(size=(30, 10)) as pilot:
        await shown(app)
        await pilot.press(*["down"] * 12, "enter")
        assert app.chosen == [12]
        assert "row 012" in app.list.text
        await pilot.press("home", "enter", "end", "enter")
        assert app.chosen == [12, 0, 99]
        await pilot.press("down", "enter")
        assert app.chosen[-1] == 99


async def test_a_list_that_shrinks_keeps_its_cursor_inside() -> None:
    app = ListApp(cursor=True)
    async with app.run_test(size=(30, 10)) as pilot:
        await shown(app)
        await pilot.press("end")
        app.list.show_all(ROWS[:3], PLAIN)
        await pilot.press("enter")
        assert app.chosen == [2]
        app.list.show_all([], PLAIN)
        await pilot.press("enter", "down")
        assert app.chosen == [2]


# --- a real terminal ------------------------------------------------------------------------------

PROGRAM = """
import sys
from pathlib import Path
from fluxtui.app import FluxApp
from fluxtui.sources.replay import ReplaySource
FluxApp(ReplaySource(Path(sys.argv[1]), None), low_bandwidth=len(sys.argv) > 2).run()
"""
ALTERNATE_SCREEN, MAIN_SCREEN = rb"\x1b\[\?1049h", rb"\x1b\[\?1049l"
RULE_IN_ROW_4 = (
    rb"\x1b\[4;1H[^\xe2]*\xe2\x94\x80 "  # where the memory begins at 80x24, without boxes
)


class Terminal:
    """The app in a pseudo-terminal of 120x40."""

    def __init__(self, journal: Path, *arguments: str, **environment: str) -> None:
        self.end, other = pty.openpty()
        fcntl.ioctl(other, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 120, 0, 0))
        environment = {**os.environ, "TERM": "xterm-256color", **environment}
        for name in ("COLUMNS", "LINES"):  # they would outweigh the terminal's own size
            environment.pop(name, None)
        self.process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(journal), *arguments],
            stdin=other, stdout=other, stderr=other, env=environment, start_new_session=True,
        )  # fmt: skip
        os.close(other)
        self.seen = b""

    def read_until(self, wanted: bytes, limit_s: float = 120.0) -> None:
        deadline_s = time.monotonic() + limit_s
        while not re.search(wanted, self.seen):
            assert time.monotonic() < deadline_s, f"{wanted!r} not in {self.seen[-400:]!r}"
            if select.select([self.end], [], [], 0.2)[0]:
                try:
                    self.seen += os.read(self.end, 1 << 16)
                except OSError:  # the other end is closed
                    return

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(60)
        os.close(self.end)


@pytest.fixture
def terminal(tmp_path: Path, made: ModuleType) -> Iterator[Terminal]:
    journal = made.write(tmp_path / "events.ndjson", made.training(80))
    opened = Terminal(journal)
    yield opened
    opened.close()


def test_the_app_draws_in_a_real_terminal_and_gives_it_back(terminal: Terminal) -> None:
    terminal.read_until(b"Buffers")
    assert re.search(ALTERNATE_SCREEN, terminal.seen)
    os.write(terminal.end, b"q")
    terminal.read_until(MAIN_SCREEN)
    assert terminal.process.wait(60) == 0


def test_a_screen_comes_by_its_key_in_a_real_terminal(terminal: Terminal) -> None:
    terminal.read_until(b"Buffers")
    os.write(terminal.end, b"6")
    terminal.read_until(b"What was chosen, and why")


def test_a_terminal_that_is_resized_is_drawn_anew(terminal: Terminal) -> None:
    terminal.read_until(b"Buffers")
    terminal.seen = b""
    fcntl.ioctl(terminal.end, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    os.killpg(terminal.process.pid, signal.SIGWINCH)
    terminal.read_until(RULE_IN_ROW_4)


def test_a_suspended_app_comes_back(terminal: Terminal) -> None:
    terminal.read_until(b"Buffers")
    terminal.process.send_signal(signal.SIGSTOP)
    time.sleep(0.3)
    terminal.process.send_signal(signal.SIGCONT)
    os.write(terminal.end, b"4")
    terminal.read_until(b"Gradient norm")


def test_what_is_copied_reaches_the_clipboard_of_the_terminal_itself(terminal: Terminal) -> None:
    """As OSC 52, so that it works through ssh too."""
    terminal.read_until(b"Buffers")
    os.write(terminal.end, b"Y")
    terminal.read_until(rb"\x1b\]52;c;[A-Za-z0-9+/=]{20,}")
    copied = re.search(rb"\x1b\]52;c;([A-Za-z0-9+/=]+)", terminal.seen)
    assert copied is not None
    assert base64.b64decode(copied[1]).startswith(b"fluxtrain-tui --attach /")


def colours_in(output: bytes) -> set[str]:
    """The parts of SGR sequences that choose a colour (ECMA-48 8.3.117, and 90 to 107)."""
    found = set()
    for sequence in re.findall(rb"\x1b\[([0-9;:]*)m", output):
        for part in re.split(r"[;:]", sequence.decode()):
            number = int(part or 0)
            if 30 <= number <= 38 or 40 <= number <= 48 or 90 <= number <= 107:
                found.add(part)
    return found


def test_no_color_leaves_no_colour_in_what_the_terminal_gets(
    tmp_path: Path, made: ModuleType
) -> None:
    journal = made.write(tmp_path / "events.ndjson", made.training(80))
    plain = Terminal(journal, NO_COLOR="1")
    try:
        plain.read_until(b"Buffers")
        escape = b"\x1b[27u"  # as of kitty's protocol: one key, whatever follows
        for key, shown in ((b"2", b"By category"), (b"4", b"Gradient norm"), (b"7", b"state"),
                           (b"?", b"whole run"), (escape, b"state"), (b":", b"Search"),
                           (escape, b"state"), (b"t", b"NO_COLOR")):  # fmt: skip
            plain.seen, before = b"", plain.seen
            assert colours_in(before) == set()
            os.write(plain.end, key)
            plain.read_until(shown)
        assert re.search(rb"\x1b\[[0-9;]*7m|\x1b\[1m", before), "bold and reversed text stays"
    finally:
        plain.close()


@pytest.mark.parametrize("value", ["", None])
def test_an_empty_no_color_asks_for_nothing(
    tmp_path: Path, made: ModuleType, value: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    journal = made.write(tmp_path / "events.ndjson", made.training(80))
    coloured = Terminal(journal, **({} if value is None else {"NO_COLOR": value}))
    try:
        coloured.read_until(b"Buffers")
        assert colours_in(coloured.seen) != set()
    finally:
        coloured.close()


def test_low_bandwidth_draws_once_a_second(tmp_path: Path) -> None:
    from fluxtui.app import FluxApp

    slow = FluxApp(None, low_bandwidth=True, runs_folder=tmp_path, sample_machine=False)
    fast = FluxApp(None, runs_folder=tmp_path, sample_machine=False)
    assert (slow.period_s(), fast.period_s()) == (1.0, 0.25)
