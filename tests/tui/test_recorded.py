"""The fold and the panels on journals that real runs wrote (tests/tui/recorded/README.md)."""

from __future__ import annotations

from pathlib import Path

import pytest

from fluxtrain.events import events as ev
from fluxtrain.events.reader import JournalFollower
from fluxtrain.events.trace.ring import read_ring
from fluxtui.panels import PANELS
from fluxtui.panels.block import bytes_of, name_of
from fluxtui.screens.panel_screen import framed
from fluxtui.state.run import FoldedRun
from fluxtui.state.status import Link
from fluxtui.state.view import View
from fluxtui.widgets.spans import width_of

RECORDED = Path(__file__).parent / "recorded"
RUNS = (
    *("demo", "killed", "resumed", "diverged", "h200", "h200-cards", "streamed"),
    *("spilled", "processes"),
)


def events_of(run: str) -> list[ev.AnyEvent]:
    return JournalFollower(RECORDED / run / "events.ndjson").read_all()


def view_of(run: str, **link: object) -> View:
    state = FoldedRun().after_all(events_of(run))
    assert state.last_wall_s is not None
    return View(state=state, link=Link(**link), wall_s=state.last_wall_s + 1)  # type: ignore[arg-type]


@pytest.mark.parametrize("run", RUNS)
def test_a_recorded_journal_has_no_gap_and_no_garbage(run: str) -> None:
    follower = JournalFollower(RECORDED / run / "events.ndjson")
    seqs = [event.seq for event in follower.read_all()]
    assert seqs == list(range(1, len(seqs) + 1))
    assert follower.garbage_lines == 0


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize(("width", "height"), [(38, 6), (80, 12), (196, 30)])
def test_every_panel_draws_every_moment_of_a_real_run(run: str, width: int, height: int) -> None:
    events = events_of(run)
    state = FoldedRun()
    for i, event in enumerate(events):
        state = state.after(event)
        if i % max(1, len(events) // 12) and i != len(events) - 1:
            continue
        view = View(state=state, link=Link(process="alive"), wall_s=event.wall_s)
        for panel in PANELS.values():
            lines = framed(panel, view, width, height, "box")
            assert {width_of(spans) for spans in lines} == {width}, panel.id


def test_a_finished_run_is_finished_with_falling_loss() -> None:
    view = view_of("demo", process="dead")
    assert view.status.kind == "finished"
    loss = view.state.loss
    assert loss.smooth is not None and loss.smooth < loss.buckets[0].mean - 1.0
    assert view.state.step is not None and view.state.step.step == view.state.step.total_steps
    assert len(view.state.evaluations) >= 2 and view.state.checkpoint is not None


@pytest.mark.parametrize("run", RUNS)
def test_the_parts_of_real_samples_add_up(run: str) -> None:
    for event in events_of(run):
        if isinstance(event, ev.MemorySampled) and event.device_used_bytes is not None:
            assert sum(event.device_by.values()) == event.device_used_bytes
        elif isinstance(event, ev.StepFinished):
            assert sum(event.phases_s.values()) == pytest.approx(event.step_s, rel=0.02)
            assert sum(event.stalls_s.values()) <= event.step_s * 1.001
        elif isinstance(event, ev.ResidencySampled):
            assert len(event.weights) == len(event.gradients) == len(event.optimizer)


def test_a_killed_run_is_dead_and_shows_no_rates() -> None:
    view = view_of("killed", process="dead")
    assert view.status.kind == "dead" and "resume it from step" in view.status.detail
    assert view.fresh(view.state.traffic) is None and view.fresh(view.state.step) is None


def test_a_resumed_run_counts_each_step_once() -> None:
    state = FoldedRun()
    for event in events_of("resumed"):
        state = state.after(event)
        steps = [step.step for step in state.steps]
        assert steps == sorted(set(steps))
        edges = [bucket.last for bucket in state.loss.buckets]
        assert edges == sorted(set(edges))
    assert state.processes == 2
    assert state.step is not None and state.loss.buckets[-1].last == state.step.step
    assert sum(bucket.count for bucket in state.loss.buckets) == state.step.step


def test_the_eta_of_a_resumed_run_is_of_its_own_steps() -> None:
    events = events_of("resumed")
    second = next(i for i, e in enumerate(events) if isinstance(e, ev.Hello) and e.first_step)
    first = next(e for e in events[second:] if isinstance(e, ev.StepFinished) and e.eta_s)
    left = first.total_steps - first.step
    rate_s = [e.step_s for e in events[second:] if isinstance(e, ev.StepFinished)]
    assert first.eta_s is not None
    assert first.eta_s < 4 * left * max(rate_s)


def test_a_diverged_run_says_why_and_what_to_do() -> None:
    view = view_of("diverged", process="dead")
    assert view.status.kind == "failed"
    assert "Diverged" in view.status.detail and "learning" in view.status.detail


def test_a_real_trainer_tells_each_blocks_name_and_bytes() -> None:
    view = view_of("blocks")
    sample = view.state.residency
    assert sample is not None
    names = [name_of(sample, i) for i in range(len(sample.weights))]
    assert names == [f"model.layers.{i}" for i in range(6)]
    for i in range(len(names)):
        weights, gradients, optimizer = bytes_of(sample, i)
        assert weights and gradients and optimizer
        assert any(move.block == names[i] and move.what == "weights" for move in view.state.moves)
    moved = {m.bytes for m in view.state.moves if m.block == names[0] and m.what == "weights"}
    assert moved == {bytes_of(sample, 0)[0]}, "what is copied is what a block has"


def test_optimizer_states_on_disk_are_seen_there_and_in_the_traffic() -> None:
    view = view_of("spilled")
    residency, memory, traffic = view.state.residency, view.state.memory, view.state.traffic
    assert residency is not None and memory is not None and traffic is not None
    assert set(residency.optimizer) == {"N"} and memory.disk_bytes > 0
    last = list(read_ring(RECORDED / "spilled" / "timeline.ring"))[-1]
    assert sum(one.duration_s for one in last.intervals if one.lane == "disk") > 0
    assert traffic.disk_written_bytes > traffic.disk_read_bytes / 2 > 0


def test_two_processes_of_two_cards_have_a_row_each() -> None:
    view = view_of("processes")
    assert (view.ranks, view.cards) == (2, 2)
    assert view.state.step is not None
    assert [(one.card, one.cards) for one in view.state.step.ranks] == [(0, 2), (2, 2)]
