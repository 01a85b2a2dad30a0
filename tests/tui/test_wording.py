"""What is said is true, in whole words with their units, at every size that has panels."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from msgspec.structs import replace as changed

from fluxtrain.events import events as ev
from fluxtrain.events.reader import JournalFollower
from fluxtrain.events.run_folder.run_dir import RunSummary
from fluxtui.actions.table import ACTIONS
from fluxtui.panels import PANELS
from fluxtui.panels.advice import PANEL as ADVICE
from fluxtui.panels.bus import totals_line
from fluxtui.panels.log import rows
from fluxtui.screens import arrangement
from fluxtui.screens.charts import Dashboard, LossScreen, MemoryScreen, TransferScreen
from fluxtui.screens.chrome import header_line, notice_lines, status_line
from fluxtui.screens.plan import plan_lines
from fluxtui.screens.run_rows import columns, run_detail, run_row
from fluxtui.screens.settings import key_lines
from fluxtui.sources.replay import ReplaySource
from fluxtui.state.run import FoldedRun, LogLine
from fluxtui.state.status import Link
from fluxtui.state.view import View
from fluxtui.widgets.footer import footer_line, shown_actions
from fluxtui.widgets.spans import Line, width_of
from fluxtui.wizard.engine.asked import Asked
from fluxtui.wizard.pages import drawing
from fluxtui.wizard.pages.waiting import pending
from fluxtui.words import counted

RECORDED = Path(__file__).parent / "recorded"
RUNS = ("demo", "killed", "resumed", "diverged", "h200", "h200-cards", "streamed")
SIZES = ((60, 20), (80, 24), (100, 34), (120, 40), (200, 60))
OTHERS_WORDS = ("log", "moves", "lanes", "step", "recent_steps")  # names and texts of any length
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


@pytest.mark.parametrize("width", [56, 76, 110])
@pytest.mark.parametrize("run", RUNS)
def test_the_plan_cuts_nothing(run: str, width: int) -> None:
    assert max(map(width_of, plan_lines(view_of(run), width))) <= width + 9


@pytest.mark.parametrize("width", [60, 72, 80, 120])
def test_the_list_of_runs_leaves_whole_columns_out_where_it_is_narrow(width: int) -> None:
    run = RunSummary(
        run_id="20261121-031500-demo", path="/runs/20261121-031500-demo", state="running",
        started_s=0.0, updated_s=90.0, step=80, total_steps=200, loss=3.25, eta_s=100.0,
        stepped_s=100.0, step_s=60.0, model="demo", method="full",
    )  # fmt: skip
    row, names = (whole([one]) for one in (run_row(run, None, 100.0, width), columns(width)))
    assert "…" not in row + names
    assert "1m 40s" in row and "left" in names.split()
    assert "3.25" in row + whole(run_detail(run, width)), "the loss is somewhere"


def test_a_long_line_of_the_log_is_shown_to_its_end() -> None:
    text = "the loss is nan at step 81: lower train.learning_rate (now 3e-4) " * 3
    lines = rows(LogLine(0.0, "error", "failed", text), 58)
    assert max(map(width_of, lines)) <= 58
    assert " ".join(whole(lines).split()).endswith("(now 3e-4)")
    assert "…" not in whole(lines) and whole(lines).count("nan") == 3


@pytest.mark.parametrize("width", [60, 80, 120])
def test_the_settings_tell_every_key_in_whole_words(width: int) -> None:
    lines = key_lines(ACTIONS, "/home/somebody/.config/fluxtrain/app.toml", width)
    text = " ".join(whole(lines).split())
    assert "…" not in text and max(map(width_of, lines)) <= width
    for action in ACTIONS:
        assert action.id in text


# --- what is said is true -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "ended", "said"),
    [(False, False, "none so far"), (False, True, "none was given"), (True, False, "none now"),
     (True, True, "none at the end")],
)  # fmt: skip
def test_no_advice_is_told_as_it_is(made: ModuleType, given: bool, ended: bool, said: str) -> None:
    events = made.training(30)[:-1]  # the last one is advice
    if given:
        events += [ev.AdviceGiven(id="x", text="more", gain="+9%", how="a=1")]
        events += [ev.AdviceWithdrawn(id="x")]
    if ended:
        events += [made.finished()[-1]]
    view = View(state=FoldedRun().after_all(made.stamped(events)), wall_s=made.START_S)
    assert view.state.advice == ()
    assert said in whole(ADVICE.body(view, 60, 5))
    assert said in whole(plan_lines(view, 80))
    again = made.stamped([*events, made.hello(pid=1)])
    assert not FoldedRun().after_all(again).advised, "the next process has given none"


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


@pytest.mark.parametrize(
    ("number", "said"), [(0, "0 rows"), (1, "1 row"), (2, "2 rows"), (1024, "1,024 rows")]
)
def test_one_is_one(number: int, said: str) -> None:
    assert counted(number, "row") == said


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


def long_run(made: ModuleType) -> View:
    """A run with hours before it, as the recorded ones have not."""
    step = changed(made.step(18, 100_000), eta_s=845.0 * 60, eta_spread_s=121.0 * 60)
    state = FoldedRun().after_all(made.stamped([made.hello(total_steps=100_000), step]))
    alive = Link(process="alive")
    return View(state=state, link=alive, wall_s=(state.last_wall_s or 0.0) + 0.5)


@pytest.mark.parametrize("width", [56, 58, 60, 72, 80, 100])
def test_a_long_time_left_gives_up_its_clock_and_spread_before_it_is_cut(
    made: ModuleType, width: int
) -> None:
    text = whole(PANELS["progress"].body(long_run(made), width, 2)).splitlines()[0]
    assert "…" not in text and "0.0%" in text and "ETA 14h 05m" in text
    assert (" at " in text) <= ("±" in text)


@pytest.mark.parametrize(("width", "told"), [(50, "ETA 14h"), (59, "±"), (34, "loss")])
def test_the_one_line_of_a_tiny_terminal_tells_the_time_left(
    made: ModuleType, width: int, told: str
) -> None:
    text = whole([status_line(long_run(made), width)])
    assert told in text and "…" not in text and len(text) <= width


@pytest.mark.parametrize(("width", "told"), [(34, False), (44, True), (50, False), (90, True)])
def test_the_one_line_of_a_tiny_terminal_tells_how_to_leave_where_it_fits(
    made: ModuleType, width: int, told: bool
) -> None:
    text = whole([status_line(long_run(made), width)])
    assert ("d leaves" in text) == told and len(text) <= width
    if width > 44:
        assert "ETA 14h" in text  # the time left comes before it


@pytest.mark.parametrize("width", [58, 69, 77, 80, 84, 90, 100])
def test_two_runs_of_a_day_have_two_names_in_the_list(width: int) -> None:
    names = ("20261122-085154-demo", "20261122-085154-tales", "20261122-085154-" + "x" * 60)
    seen = []
    for name in names:
        run = RunSummary(
            run_id=name, path=f"/runs/{name}", state="dead", started_s=0.0, updated_s=9
        )
        seen.append(run_row(run, None, 0.0, width)[2][0].strip())
    assert len(set(seen)) == 3 and seen[0] == names[0]
    assert seen[2].startswith("…") and seen[2].endswith("xxx")


def test_what_came_back_is_not_told_without_what_went() -> None:
    view = view_of("streamed", 0.6, process="alive")
    for width in range(1, 60):
        text = whole([totals_line(view.state.traffic, width)])
        assert ("back" in text) <= ("to device" in text)


def test_events_that_came_too_fast_are_told_in_the_header() -> None:
    view = view_of("demo", 0.6, process="alive")
    assert view.state.traffic is not None
    late = replace(view, state=view.state.after(changed(view.state.traffic, dropped=2)))
    assert "2 events not drawn" in whole([header_line(late, 160)])
    assert "not drawn" not in whole([header_line(view, 160)])


@pytest.mark.parametrize("panel_id", ["bus", "rates"])
def test_rates_of_a_run_that_has_ended_are_called_its_last(panel_id: str) -> None:
    def heading(run: str, share: float) -> str:
        return whole([PANELS[panel_id].heading(view_of(run, share, process="alive"), 118)])

    assert heading("demo", 1.0).startswith("last") and heading("diverged", 1.0).startswith("last")
    assert "last" not in heading("demo", 0.6)


def test_each_line_of_the_rates_has_a_letter_of_its_own() -> None:
    """Reads and writes of the disk have one colour, and there are terminals without any."""
    view = view_of("streamed", process="alive")
    heading = whole([PANELS["rates"].heading(view, 120)])
    drawn = whole(PANELS["rates"].body(view, 100, 20))
    for letter, label in (("I", "in"), ("O", "out"), ("W", "N W")):
        assert f"{letter} {label}" in heading
    high = {name for name in ("I", "O", "W") if name in drawn}
    assert {"I", "O", "W"} <= high


@pytest.mark.parametrize("width", [40, 60, 80])
def test_a_value_of_the_wizard_goes_on_below_where_only_a_path_is_cut(width: int) -> None:
    time, path = "400 steps take 3m 46s to 6m 24s, by the speed of the dry run", "/d" * 60
    for draw in (drawing.pairs, drawing.facts):
        lines = draw([("time", time), ("data", path)], width).plain.splitlines()
        assert time in " ".join(" ".join(lines).replace("time ", "").split())
        assert max(map(len, lines)) <= width
        assert lines[-1].count("…") == 1 and lines[-1].endswith("/d")


@pytest.mark.parametrize("width", [40, 56, 80])
def test_what_the_engine_is_asked_is_told_in_whole_words(width: int) -> None:
    what = "The engine reads the model and measures what is free"
    said = "a second chunk size of one block is tried at the moment"
    text = pending(what, Asked(said=said), width, "goes on by itself").plain
    assert "…" not in text and max(map(len, text.splitlines())) <= width
    assert what in " ".join(text.split()) and said in " ".join(text.split())


def test_the_arrangements_have_a_place_for_what_is_tested() -> None:
    assert arrangement.dashboard(60, 18) and arrangement.memory(60, 18)
