"""The log's filter: words, levels, kinds, and what is marked."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from fluxtrain.events import events as ev
from fluxtui.screens.log import LogScreen, marked
from fluxtui.state.history import History
from fluxtui.state.log_lines import HELD_LIMIT, LEVELS, HeldLog, LogFilter
from fluxtui.state.run import LOG_LIMIT, LogLine
from fluxtui.widgets.scrolling import ScrollingLines

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


def log_of(first: int, last: int, before: History[LogLine] | None = None) -> History[LogLine]:
    log: History[LogLine] = History(LOG_LIMIT) if before is None else before
    for number in range(first, last + 1):
        log = log.appended(LogLine(float(number), "info", "log", f"line {number}"))
    return log


def test_a_held_log_loses_no_line_and_gains_the_newer_ones() -> None:
    log = log_of(1, LOG_LIMIT)
    held = HeldLog.of(log)
    for last in (LOG_LIMIT + 1, LOG_LIMIT + 700, 2 * LOG_LIMIT):
        log = log_of(int(log.newest.wall_s) + 1 if log.newest else 1, last, log)
        held = held.after(log)
        assert [one.wall_s for one in held.lines] == list(range(1, last + 1))
        assert held.newer(log) == 0


def test_a_held_log_is_bounded_and_counts_what_it_leaves_out() -> None:
    log = log_of(1, 10)
    held = HeldLog.of(log)
    for number in range(11, HELD_LIMIT + 500):
        log = log_of(number, number, log)
        held = held.after(log)
    assert len(held.lines) == HELD_LIMIT and held.newer(log) == 499
    missed = held.after(log_of(HELD_LIMIT + 500, HELD_LIMIT + 9999, log))
    assert missed == held, "no line appears after lines that are gone"
    assert [one.wall_s for one in held.after(log_of(1, 3)).lines] == [1, 2, 3], "of another run"


async def test_a_held_log_stays_where_the_user_looks_when_its_oldest_lines_go(
    made: ModuleType, tmp_path: Path, app_pilot: Any
) -> None:
    journal = tmp_path / "runs" / "demo" / "events.ndjson"
    lines = [ev.LogWritten(level="info", text=f"line {i}.") for i in range(LOG_LIMIT + 900)]
    events = made.stamped([made.hello(), made.step(1), *lines])
    made.write(journal, events[:-900])
    app = app_pilot.app_on(journal.parent, made, start_screen="log")
    async with app.run_test(size=(100, 30)) as pilot:
        await app_pilot.drawn(pilot)
        await pilot.press("home", "pagedown")
        await app_pilot.until(pilot, lambda: "held here" in app_pilot.text_of(app))
        await app_pilot.still(pilot)
        body = app.screen.query_one("#body", ScrollingLines)
        before = body._lines
        made.write(journal, events)
        await app_pilot.until(pilot, lambda: app.view.state.log.total > LOG_LIMIT + 890)
        await app_pilot.still(pilot)
        assert body._lines == before
        assert f"{LOG_LIMIT + 900:,} lines" in app_pilot.text_of(app)
        await pilot.press("end")
        await app_pilot.until(pilot, lambda: f"line {LOG_LIMIT + 899}." in app_pilot.text_of(app))
        assert f"{LOG_LIMIT:,} lines" in app_pilot.text_of(app)
