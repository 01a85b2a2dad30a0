"""One number of a run is written in one way: in panels, lists, the log, lines and the trainer's."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest

from fluxtrain.events.console import line
from fluxtrain.events.events import Done, EvaluationFinished, StepFinished
from fluxtrain.events.frames import decode_line
from fluxtrain.events.run_folder.run_dir import RunDir
from fluxtrain.units import loss_text
from fluxtui.headless import event_line
from fluxtui.panels import PANELS
from fluxtui.screens.chrome import status_line
from fluxtui.screens.run_rows import run_row
from fluxtui.state.run import FoldedRun
from fluxtui.state.view import View
from fluxtui.widgets.spans import Line

RECORDED = Path(__file__).parent / "recorded"
RUNS = sorted(path.parent.name for path in RECORDED.glob("*/events.ndjson"))
WIDTH = 190


def events_of(name: str) -> list[object]:
    journal = (RECORDED / name / "events.ndjson").read_bytes().splitlines()
    return [event for text in journal if (event := decode_line(text)) is not None]


def view_of(name: str) -> View:
    events = events_of(name)
    state = FoldedRun().after_all(events)  # type: ignore[arg-type]
    return View(state=state, wall_s=events[-1].wall_s)  # type: ignore[attr-defined]


def said(lines: list[Line] | Line) -> str:
    whole = lines if isinstance(lines, list) else [lines]
    return "\n".join("".join(text for text, _ in spans) for spans in whole)


def panel(view: View, name: str) -> str:
    one = PANELS[name]
    return said(one.heading(view, WIDTH)) + "\n" + said(one.body(view, WIDTH, 20))


@pytest.mark.parametrize("name", RUNS)
def test_the_newest_loss_reads_alike_everywhere(name: str) -> None:
    view = view_of(name)
    step = view.state.step
    assert step is not None
    text = loss_text(step.loss)
    assert re.search(rf"loss {re.escape(text)}\b", panel(view, "progress"))
    assert f"train {text}" in panel(view, "loss") and f"train {text}" in panel(view, "readout")
    assert re.search(rf"{step.step}\s.*{re.escape(text)}", panel(view, "recent_steps"))
    assert f"loss {text}" in said(status_line(view, WIDTH))
    assert f"loss {text}" in event_line(step) and f"loss {text}" in str(line(step))
    row = said(run_row(RunDir(RECORDED / name).summary(), None, time.time(), WIDTH))
    assert text in row, "the list of runs"


@pytest.mark.parametrize("name", RUNS)
def test_an_evaluation_reads_alike_in_panels_log_and_lines(name: str) -> None:
    view = view_of(name)
    found = view.state.evaluation
    if found is None:
        return
    text = loss_text(found.loss)
    for name_of_panel in ("progress", "loss", "readout"):
        assert f"eval {text}" in panel(view, name_of_panel)
    newest = [one for one in events_of(name) if isinstance(one, EvaluationFinished)][-1]
    assert text in event_line(newest) and text in str(line(newest))
    logged = [entry.text for entry in view.state.log if entry.kind == "evaluation"]
    assert any(f"loss {text}" in entry for entry in logged)
    done = view.state.done
    if isinstance(done, Done) and done.evaluation_loss == found.loss:
        assert f"evaluation loss {text}" in str(line(done))


@pytest.mark.parametrize("name", RUNS)
def test_memory_and_transfers_have_the_same_numbers_on_each_screen(name: str) -> None:
    view = view_of(name)
    sample = view.state.memory
    if sample is None or view.fresh(sample) is None:
        return
    now = re.search(r"([\d.]+ [KMGT]?i?B)", panel(view, "memory"))
    total = re.search(r"all of it\s+([\d.]+ [KMGT]?i?B)", panel(view, "categories"))
    assert now is not None and total is not None and now[1] == total[1]
    for category, size in re.findall(r"[WGOASC]  (\w+)\s+([\d.]+ [KMGT]?i?B)",
                                     panel(view, "categories")):  # fmt: skip
        shown = re.search(rf"{category} ([\d.]+ [KMGT]?i?B)", panel(view, "memory"))
        assert shown is None or shown[1] == size, category
    moved = re.findall(r"moved ([\d.]+ \w+) to device\s+([\d.]+ \w+) back", panel(view, "bus"))
    again = re.findall(r"moved ([\d.]+ \w+) to device\s+([\d.]+ \w+) back", panel(view, "stalls"))
    assert moved == again
    rates = re.findall(r"([\d.]+ [kMG]?B/s)", panel(view, "rates").split("\n")[0])
    shown_rates = panel(view, "bus")
    assert all(rate in shown_rates for rate in rates)


def test_every_step_of_a_run_has_one_loss_in_lines_of_both_commands() -> None:
    steps = [event for event in events_of("demo") if isinstance(event, StepFinished)]
    assert len(steps) > 100
    for step in steps:
        assert f"loss {loss_text(step.loss)}" in event_line(step)
        assert f"loss {loss_text(step.loss)}" in str(line(step))
