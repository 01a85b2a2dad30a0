"""The answers to the run's prompts: folded from events, and drawn beside the loss."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest

from fluxtrain.events import events as ev
from fluxtui.panels import PANELS
from fluxtui.panels.panel import Panel
from fluxtui.screens import arrangement
from fluxtui.state.run import FoldedRun
from fluxtui.state.samples import ROUNDS_LIMIT
from fluxtui.state.view import ChartSettings, View
from fluxtui.widgets.lines import Lines
from fluxtui.widgets.spans import width_of
from tests.tui.app_pilot import app_on, until

PANEL: Panel = PANELS["samples"]


def answers(step: int, *texts: str, ended: str = "end") -> list[ev.AnyEvent]:
    """One round."""
    return [
        ev.SampleGenerated(step=step, prompt=f"prompt {number}", text=text, number=number,
                           count=len(texts), tokens=9, ended=ended, seconds=1.5)
        for number, text in enumerate(texts, 1)
    ]  # fmt: skip


def lines(view: View, width: int, height: int) -> list[str]:
    drawn = PANEL.body(view, width, height)
    assert len(drawn) <= height and all(width_of(one) <= width for one in drawn)
    return ["".join(text for text, _ in one).rstrip() for one in drawn]


def head(view: View, width: int = 60) -> str:
    return "".join(text for text, _ in PANEL.heading(view, width))


def test_rounds_follow_the_run_and_its_resume(made: ModuleType) -> None:
    state = FoldedRun().after_all([*answers(0, "a", "b"), *answers(40, "c", "d")])
    assert [(one.step, len(one.answers)) for one in state.samples] == [(0, 2), (40, 2)]
    state = state.after(ev.SampleGenerated(step=40, prompt="x", text="y"))  # of the run's end
    assert [one.step for one in state.samples] == [0, 40] and state.sample is not None
    again = state.after_all([made.hello(first_step=20, pid=77), *answers(40, "e", "f")])
    assert [one.answers[0].text for one in again.samples] == ["a", "e"]
    for step in range(200):
        again = again.after_all(answers(50 + step, "z"))
    assert len(again.samples) == ROUNDS_LIMIT


def test_answers_are_drawn_with_their_prompts_and_the_step() -> None:
    state = FoldedRun().after_all([*answers(0, "one", "two"), *answers(40, "three", "four")])
    view = View(state=state)
    assert lines(view, 40, 8) == ["› prompt 1", "  three", "› prompt 2", "  four"]
    assert head(view) == "after step 40  2 prompts in 1.50 s"
    earlier = View(state=state, chart=ChartSettings(crosshair=39))
    assert lines(earlier, 40, 8)[1] == "  one"
    assert head(earlier).startswith("before the first step")


def test_room_goes_to_the_answers_that_need_it_and_what_is_missing_is_said() -> None:
    long = "word " * 60
    view = View(state=FoldedRun().after_all(answers(1, "short", long, "x", ended="length")))
    drawn = lines(view, 30, 10)
    assert len(drawn) == 10 and drawn[1] == "  short …"
    assert drawn[7].endswith(" …") and drawn[8:] == ["› prompt 3", "  x …"]
    low = lines(view, 30, 3)
    assert low[0] == "› prompt 1" and low[-1] == " 2 more prompts: f shows all"
    for height in range(1, 12):
        for width in (1, 8, 20):
            lines(view, width, height)


@pytest.mark.parametrize("text", ["\x1b[31mred\x07", "中文" * 40, "\n\n\n", "", "\u202eabc"])
def test_any_text_can_be_drawn(text: str) -> None:
    view = View(state=FoldedRun().after_all(answers(1, text, text)))
    for width in (10, 33):
        for line in lines(view, width, 6):
            assert "\x1b" not in line and "\u202e" not in line


@pytest.mark.parametrize("size", [(80, 22), (120, 38), (200, 58), (60, 18)])
def test_samples_stand_beside_the_loss_only_where_there_are_some(size: tuple[int, int]) -> None:
    assert "samples" not in arrangement.loss(*size)
    places = arrangement.loss(*size, samples=True)
    cells: set[tuple[int, int]] = set()
    for place in places.values():
        x, y, width, height = place.rect
        new = {(x + dx, y + dy) for dx in range(width) for dy in range(height)}
        assert not new & cells and height >= 4
        cells |= new
    assert len(cells) == size[0] * size[1]


async def test_the_loss_screen_makes_room_when_the_first_answers_come(
    made: ModuleType, tmp_path: Path
) -> None:
    run = tmp_path / "20261121-031500-demo"
    run.mkdir()
    events = made.training(20)
    made.write(run / "events.ndjson", events)
    app = app_on(run, made, start_screen="loss")
    async with app.run_test(size=(80, 24)) as pilot:
        await until(pilot, lambda: app.view.state.step is not None)

        def shown() -> str:
            return app.screen.query_one("#samples", Lines).text

        assert not app.screen.query_one("#samples").display
        more = made.stamped(answers(20, "the list of the string"), events[-1].wall_s)
        made.write(run / "events.ndjson", [*events, *more])
        await until(pilot, lambda: app.screen.query_one("#samples").display)
        await until(pilot, lambda: "list of the string" in shown())


def test_the_progress_says_whether_the_newest_evaluation_is_the_best(made: ModuleType) -> None:
    def drawn(*evaluations: tuple[int, float]) -> str:
        state = FoldedRun().after_all(made.training(30))
        for step, loss in evaluations:
            state = state.after(ev.EvaluationFinished(step=step, loss=loss, count=9, seconds=1.0))
        body = PANELS["progress"].body(View(state=state), 110, 2)
        return "\n".join("".join(text for text, _ in line) for line in body)

    assert "eval 3.5000 @20 best" in drawn((10, 4.0), (20, 3.5))
    later = drawn((10, 4.0), (20, 3.5), (30, 3.7))
    assert "eval 3.7000 @30" in later and "best eval 3.5000 @20" in later
    assert "best" not in drawn()
