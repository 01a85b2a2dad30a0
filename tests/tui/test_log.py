"""The log's filter: words, levels, kinds, and what is marked."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from fluxtrain.telemetry import events as ev
from fluxtui.screens.log import LogScreen, marked
from fluxtui.state.log_filter import LEVELS, LogFilter
from fluxtui.state.run import LogLine

LOG = [
    LogLine(1.0, "debug", "log", "a detail"),
    LogLine(2.0, "info", "checkpoint", "step 10: checkpoint of 2 GiB"),
    LogLine(3.0, "warning", "log", "the disk is slow"),
    LogLine(4.0, "error", "failed", "the disk is full"),
]  # fmt: skip


def kept(wanted: LogFilter) -> list[float]:
    return [entry.wall_s for entry in LOG if wanted.passes(entry)]


def test_a_level_lets_through_what_is_at_least_as_grave() -> None:
    assert [len(kept(LogFilter(least=level))) for level in LEVELS] == [4, 3, 2, 1]


def test_words_level_and_kind_must_all_hold() -> None:
    assert kept(LogFilter(text="disk")) == [3.0, 4.0]
    assert kept(LogFilter(text="Disk FULL")) == [4.0]
    assert kept(LogFilter(text="warning")) == [3.0], "levels and kinds count as words"
    assert kept(LogFilter(kind="log")) == [1.0, 3.0]
    assert kept(LogFilter(text="disk", kind="log", least="warning")) == [3.0]


def test_levels_and_kinds_come_round_to_all() -> None:
    wanted = LogFilter()
    for level in (*LEVELS[1:], "debug"):
        wanted = wanted.next_level()
        assert wanted.least == level
    for kind in ("checkpoint", "failed", "log", ""):
        wanted = wanted.next_kind(LOG)
        assert wanted.kind == kind
    assert LogFilter(kind="gone").next_kind(LOG).kind == ""


@pytest.mark.parametrize(
    ("words", "found"),
    [([], []), (["disk"], ["disk"]), (["THE", "full"], ["the", "full"]), (["."], []),
     (["is", "s"], ["is", "s", "is"])],
)  # fmt: skip
def test_every_occurrence_of_a_word_is_marked(words: list[str], found: list[str]) -> None:
    spans = (("12:00 ", "dim"), ("the disk is full", "bad"))
    after = marked(spans, words)
    assert "".join(text for text, _ in after) == "12:00 the disk is full"
    if words != ["is", "s"]:
        assert [text for text, role in after if role == "selected"] == found
    assert {role for _, role in after} <= {"dim", "bad", "selected"}


async def test_keys_change_level_and_kind_and_escape_shows_all(
    made: ModuleType, tmp_path: Path, app_pilot: Any
) -> None:
    lines = [ev.LogWritten(level=level, text=f"a {level} line") for level in LEVELS]
    events = made.stamped([made.hello(), made.step(1), *lines])
    made.write(tmp_path / "runs" / "demo" / "events.ndjson", events)
    app = app_pilot.app_on(tmp_path / "runs" / "demo", made, start_screen="log")
    async with app.run_test(size=(100, 30)) as pilot:
        await app_pilot.drawn(pilot)
        await pilot.press("l", "l")
        await app_pilot.until(pilot, lambda: "warning and up" in app_pilot.text_of(app))
        text = app_pilot.text_of(app)
        assert "a warning line" in text and "a error line" in text and "a info line" not in text
        await pilot.press("o")
        await app_pilot.until(pilot, lambda: "only log" in app_pilot.text_of(app))
        await pilot.press("slash", *"error", "enter")
        await app_pilot.until(pilot, lambda: "1 of 5 lines" in app_pilot.text_of(app))
        assert isinstance(app.screen, LogScreen) and app.screen.newest == "a error line"
        await pilot.press("escape")
        await app_pilot.until(pilot, lambda: "a debug line" in app_pilot.text_of(app))
