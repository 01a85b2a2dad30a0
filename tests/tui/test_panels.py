"""Panels: they keep their box in every state and size, and show nothing that was not measured."""

from __future__ import annotations

from dataclasses import replace as changed
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from fluxtrain.units import number_text, power_text
from fluxtui.panels import PANELS
from fluxtui.panels.panel import share_text, whole_text
from fluxtui.screens.chrome import header_line, notice_lines
from fluxtui.screens.dialogs import help_lines
from fluxtui.screens.panel_screen import framed
from fluxtui.state.run import FoldedRun
from fluxtui.state.status import Link
from fluxtui.state.view import ChartSettings, View
from fluxtui.widgets.spans import Line, width_of

STATES = ("waiting", "running", "stale", "failed", "finished")
SIZES = [(1, 1), (12, 2), (38, 7), (76, 3), (118, 12), (198, 30)]
FRAMES = ("box", "rule", "bare")


def view_of(made: ModuleType, kind: str) -> View:
    state = FoldedRun()
    if kind != "waiting":
        maker = {"failed": made.failed, "finished": made.finished}.get(kind, made.training)
        state = FoldedRun().after_all(maker())
    now_s = (state.last_wall_s or 1000.0) + (3600.0 if kind == "stale" else 0.5)
    return View(state=state, link=Link(process="alive"), wall_s=now_s)


def text_of(spans: Line) -> str:
    return "".join(text for text, _ in spans)


def whole(lines: list[Line]) -> str:
    return "\n".join(text_of(spans) for spans in lines)


def drawn(view: View, panel_id: str, width: int = 118, height: int = 10) -> str:
    return whole(framed(PANELS[panel_id], view, width, height, "box"))


@pytest.mark.parametrize("kind", STATES)
@pytest.mark.parametrize("panel_id", PANELS)
def test_a_panel_keeps_its_box_at_every_size(made: ModuleType, panel_id: str, kind: str) -> None:
    view = view_of(made, kind)
    panel = PANELS[panel_id]
    for width, height in SIZES:
        body = panel.body(view, width, height)
        assert len(body) <= height, (width, height)
    for width, height in SIZES[2:]:
        for frame in FRAMES:
            lines = framed(panel, view, width, height, frame)  # type: ignore[arg-type]
            assert len(lines) == height
            assert {width_of(spans) for spans in lines} == {width}, (width, height, frame)


@pytest.mark.parametrize("panel_id", ["memory", "residency", "bus", "step", "categories"])
def test_a_stale_panel_says_so_and_shows_no_number_of_then(made: ModuleType, panel_id: str) -> None:
    stale = drawn(view_of(made, "stale"), panel_id)
    fresh = drawn(view_of(made, "running"), panel_id)
    assert "-" in stale
    assert stale != fresh
    if panel_id != "categories":
        assert "last sample 1h 00m ago" in stale
    for number in ("492 MiB", "1.50 GB/s", "616 MB/s", "900 ms"):
        assert number not in stale


def test_progress_shows_step_loss_and_eta_with_its_spread(made: ModuleType) -> None:
    text = drawn(view_of(made, "running"), "progress")
    for part in ("step 80/200", "40.0%", "3.689", "ETA", "± 4 s", "4.55 k tok/s", "900 ms a step"):
        assert part in text, part


def test_a_cpu_run_does_not_call_its_buffer_a_gpu(made: ModuleType) -> None:
    assert "Buffers" in drawn(view_of(made, "running"), "memory")
    state = FoldedRun().after_all(made.stamped([made.hello(device="NVIDIA H200"), made.memory()]))
    text = drawn(View(state=state, wall_s=made.START_S + 1), "memory")
    assert "NVIDIA H200" in text and "host buffer" not in text


# --- chrome ---------------------------------------------------------------------------------------


def test_the_status_is_in_the_header_at_any_width(made: ModuleType) -> None:
    for width in (60, 80, 120):
        assert "RUNNING" in text_of(header_line(view_of(made, "running"), width))
        assert "FAILED" in text_of(header_line(view_of(made, "failed"), width))


def test_a_failure_is_told_in_full_with_its_cure(made: ModuleType) -> None:
    text = " ".join(text_of(spans).strip() for spans in notice_lines(view_of(made, "failed"), 60))
    assert "lower train.learning_rate (now 3e-4)" in text


def test_replay_read_only_and_corruption_are_told(made: ModuleType) -> None:
    view = view_of(made, "running")
    link = changed(view.link, replay=True, corrupt_lines=3)
    text = text_of(header_line(changed(view, link=link, read_only=True), 160))
    assert "REPLAY" in text and "READ-ONLY" in text and "3 corrupt lines" in text


# --- a panel of one's own -------------------------------------------------------------------------


def test_the_panel_of_the_documentation_is_one_file_and_one_registration(
    made: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    guide = (Path(__file__).parents[2] / "docs" / "extending.md").read_text()
    file = next(part for part in guide.split("```python")[1:] if "checkpoint.py" in part)
    module: dict[str, Any] = {}
    exec(compile(file.split("```")[0], "checkpoint.py", "exec"), module)
    panel = module["PANEL"]
    monkeypatch.setitem(PANELS, panel.id, panel)
    assert "step 80" in drawn(view_of(made, "running"), "checkpoint")
    assert panel.about in whole(help_lines(panels=tuple(PANELS)))
    test_a_panel_keeps_its_box_at_every_size(made, "checkpoint", "waiting")


# --- drawing only what changed --------------------------------------------------------------------


@pytest.mark.parametrize("panel_id", [name for name, panel in PANELS.items() if panel.shows])
def test_what_a_panel_says_that_it_shows_is_all_that_it_is_drawn_from(
    made: ModuleType, panel_id: str
) -> None:
    panel = PANELS[panel_id]
    assert panel.shows is not None
    last: tuple[tuple[object, ...], str] | None = None
    state, chart, compared = FoldedRun(), ChartSettings(), 0
    for event in made.training(45):
        state = state.after(event)
        view = View(state=state, link=Link(process="alive"), wall_s=event.wall_s, chart=chart)
        shown, text = panel.shows(view), drawn(view, panel_id)
        if last is not None and all(a is b for a, b in zip(last[0], shown, strict=True)):
            assert text == last[1], f"{panel_id} changed with {type(event).__name__}"
            compared += 1
        last = (shown, text)
    assert compared > 45


# --- numbers --------------------------------------------------------------------------------------


def test_numbers_are_written_with_their_unknowns() -> None:
    assert number_text(None) == share_text(None) == whole_text(None) == power_text(None) == "-"
    assert (number_text(3.68912), number_text(12.5), number_text(1e-5)) == (
        "3.689",
        "12.50",
        "1e-05",
    )
    assert (share_text(0.031), share_text(1.0)) == ("3.1%", "100%")
    assert (whole_text(49.7), whole_text(107)) == ("50 s", "1m 47s")
    assert (power_text(3e-4), power_text(0.0)) == ("3.00e-4", "0")
