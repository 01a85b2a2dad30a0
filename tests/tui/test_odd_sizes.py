"""A terminal of a size that no terminal has is drawn in one that a screen can have."""

from __future__ import annotations

import os
from typing import Any

import pytest
from textual.drivers.linux_driver import LinuxDriver

from fluxtui.command_line import MOST_COLUMNS, MOST_ROWS, forget_odd_sizes
from fluxtui.terminal import TerminalDriver


@pytest.mark.parametrize("told", ["999999999", "-5", "0", "abc", "9" * 40, " 7", "٣", "1e3"])
def test_sizes_that_no_terminal_has_are_forgotten(
    told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LINES", told)
    monkeypatch.setenv("COLUMNS", told)
    forget_odd_sizes()
    assert "LINES" not in os.environ and "COLUMNS" not in os.environ


def test_sizes_that_a_terminal_has_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LINES", "200")
    monkeypatch.setenv("COLUMNS", "600")
    forget_odd_sizes()
    assert (os.environ["LINES"], os.environ["COLUMNS"]) == ("200", "600")


def test_the_terminals_own_size_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[tuple[int, int]] = [(65535, 65535), (100, 40)]
    monkeypatch.setattr(LinuxDriver, "_get_terminal_size", lambda self: said.pop(0))
    driver: Any = TerminalDriver.__new__(TerminalDriver)
    assert driver._get_terminal_size() == (MOST_COLUMNS, MOST_ROWS)
    assert driver._get_terminal_size() == (100, 40)
