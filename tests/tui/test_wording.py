"""What is said is true, in whole words with their units, at every size that has panels."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from fluxtrain.events import events as ev
from fluxtrain.events.reader import JournalFollower
from fluxtui.actions.table import ACTIONS
from fluxtui.panels import PANELS
from fluxtui.screens.charts import Dashboard, LossScreen, MemoryScreen, TransferScreen
from fluxtui.screens.chrome import header_line, notice_lines
from fluxtui.screens.plan import plan_lines
from fluxtui.screens.settings import key_lines
from fluxtui.sources.replay import ReplaySource
from fluxtui.state.run import FoldedRun
from fluxtui.state.status import Link
from fluxtui.state.view import View
from fluxtui.widgets.footer import footer_line, shown_actions
from fluxtui.widgets.spans import Line, width_of

RECORDED = Path(__file__).parent / "recorded"
RUNS = ("demo", "killed", "resumed", "diverged", "h200", "h200-cards", "streamed")
SIZES = ((60, 20), (80, 24), (100, 34), (120, 40), (200, 60))
OTHERS_WORDS = (
    "log",
    "news",
    "moves",
    "lanes",
    "step",
    "recent_steps",
)  # names and texts of any length
INSET = {"box": (4, 2), "rule": (0, 1), "bare": (0, 0)}


def whole(lines: list[Line]) -> str:
    return "\n".join("".join(text for text, _ in spans).rstrip() for spans in lines)


def view_of(run: str, share: float = 1.0, **link: Any) -> View:
    events = JournalFollower(RECORDED / run / "events.ndjson").read_all()
    state = FoldedRun().after_all(events[: max(1, round(len(events) * share))])
    return View(state=state, link=Link(**link), wall_s=(state.last_wall_s or 0.0) + 1)


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize(("width", "height"), SIZES)
def test_no_panel_cuts_a_word_or_a_unit(run: str, width: int, height: int) -> None:
    for share in (0.6, 1.0):
        view = view_of(run, share, process="alive")
        for screen in (Dashboard, MemoryScreen, TransferScreen, LossScreen):
            places = screen().places(width, height - 2)
            for name, place in places.items():
                if name in OTHERS_WORDS:
                    continue
                across, down = INSET[place.frame]
                lines = PANELS[name].body(view, place.rect.width - across, place.rect.height - down)
                assert "…" not in whole(lines), (screen.NAME, name)
                assert max(map(width_of, lines), default=0) <= place.rect.width - across, name


@pytest.mark.parametrize("width", [60, 80, 120])
def test_the_settings_tell_every_key_in_whole_words(width: int) -> None:
    lines = key_lines(ACTIONS, "/home/somebody/.config/fluxtrain/app.toml", width)
    text = " ".join(whole(lines).split())
    assert "…" not in text and max(map(width_of, lines)) <= width
    for action in ACTIONS:
        assert action.id in text


# --- what is said is true -------------------------------------------------------------------------


def test_a_recording_that_ends_before_its_run_says_so_and_promises_no_end() -> None:
    source = ReplaySource(RECORDED / "killed" / "events.ndjson", None)
    batch = source.poll()
    state = FoldedRun().after_all(batch.events)
    view = View(state=state, link=source.poll().link)
    assert state.step is not None and view.status.kind == "cut"
    assert f"after step {state.step.step}" in view.status.detail
    assert "CUT OFF" in whole([header_line(view, 120)])
    assert "the run did not" in whole(notice_lines(view, 120))
    assert "ETA -" in whole(PANELS["progress"].body(view, 100, 2))
    part = ReplaySource(RECORDED / "killed" / "events.ndjson", None, until_share=0.5)
    assert part.poll().events and not part.poll().link.over, "there is more of it"


@pytest.mark.parametrize("run", ["demo", "diverged", "killed"])
def test_an_ended_run_and_a_recording_offer_no_commands(run: str) -> None:
    shown = {one.id for one in shown_actions("dashboard", 400, False, ACTIONS, commands=False)}
    assert shown.isdisjoint({"pause", "checkpoint", "stop", "apply_advice", "undo_change"})
    assert {"new_run", "detach", "help", "maximise"} <= shown
    assert "pause" in whole([footer_line("dashboard", 400)])


def test_what_is_one_is_not_said_in_the_plural(made: ModuleType) -> None:
    planned = made.planned()
    one = ev.Planned(
        **{n: getattr(planned, n) for n in planned.__struct_fields__} | {"batch_rows": 1}
    )
    state = FoldedRun().after_all(made.stamped([made.hello(), one]))
    view = replace(View(state=state), link=Link(corrupt_lines=1))
    assert "batch of 1 row in" in state.log.newest.text
    assert "1 row of 256 tokens" in whole(plan_lines(view, 100))
    assert "1 corrupt line " in whole([header_line(view, 160)])


def test_advice_stands_once_on_a_screen() -> None:
    view = view_of("h200", 0.8, process="alive")
    assert view.state.advice
    for width, height in ((120, 40), (200, 60)):
        places = Dashboard().places(width, height - 2)
        assert set(places) <= set(Dashboard.SHOWN)
        shown = [
            whole(PANELS[name].body(view, place.rect.width - 4, place.rect.height - 2))
            for name, place in places.items()
            if name in ("log", "news", "advice")
        ]
        assert sum("▲" in text for text in shown) == 1, shown
