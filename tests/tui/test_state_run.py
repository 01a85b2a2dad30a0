"""The fold: what the screen knows after each event."""

from __future__ import annotations

import itertools
import math
from dataclasses import fields
from types import ModuleType
from typing import Any

import pytest
from msgspec.structs import replace

from fluxtrain.events import events as ev
from fluxtui.screens.chrome import badge
from fluxtui.state.freshness import LIMITS_S, fresh, limit_s
from fluxtui.state.run import FoldedRun
from fluxtui.state.status import Link, status_of
from fluxtui.state.view import View


def test_folding_in_batches_equals_folding_one_by_one(made: ModuleType) -> None:
    events = made.training(60)
    one_by_one = FoldedRun()
    for event in events:
        one_by_one = one_by_one.after(event)
    batched = FoldedRun().after_all(events[:100]).after_all(events[100:])
    for name in one_by_one.__struct_fields__:
        left, right = getattr(one_by_one, name), getattr(batched, name)
        same = list(left) == list(right) if hasattr(left, "appended") else left == right
        assert same, name


def test_a_fold_leaves_the_earlier_state_as_it_was(made: ModuleType) -> None:
    events = made.training(20)
    earlier = FoldedRun().after_all(events[:60])
    seen, lines, steps = earlier.seen, list(earlier.log), list(earlier.steps)
    earlier.after_all(events[60:])
    assert (earlier.seen, list(earlier.log), list(earlier.steps)) == (seen, lines, steps)


def test_the_best_is_of_the_evaluations_and_never_of_the_training_loss(made: ModuleType) -> None:
    def told(step: int, loss: float, **best: Any) -> ev.EvaluationFinished:
        return ev.EvaluationFinished(step=step, loss=loss, count=9, seconds=1.0, **best)

    state = FoldedRun().after_all(made.training(30))
    assert state.step is not None and state.best is None
    older = state.after(told(30, 3.0)).after(told(40, math.nan)).after(told(50, 3.5))
    assert older.best == (30, 3.0)
    newer = older.after(told(60, 3.2, best_step=12, best_loss=2.9))  # out of a longer past
    assert newer.best == (12, 2.9)
    ended = newer.after(ev.StoppedEarly(step=60, total_steps=90, stale=3, threshold=0.0,
                                        best_step=12, best_loss=2.9))  # fmt: skip
    assert "stopped early after step 60" in ended.log.newest.text  # type: ignore[union-attr]


def test_what_happened_is_in_the_log_in_order(made: ModuleType) -> None:
    state = FoldedRun().after_all(made.failed())
    kinds = [entry.kind for entry in state.log]
    assert kinds[:3] == ["phase", "phase", "phase"] and kinds[-2:] == ["failed", "done"]
    levels = {entry.level for entry in state.log}
    assert {"info", "warning", "error"} <= levels


def test_the_same_advice_twice_is_shown_once() -> None:
    advice = ev.AdviceGiven(text="a larger batch hides the update")
    state = FoldedRun().after(advice).after(advice)
    assert [given.text for given in state.advice] == [advice.text]


def test_a_resumed_run_forgets_the_steps_it_does_again(made: ModuleType) -> None:
    first = made.training(90)
    again = made.stamped([made.hello(first_step=80, pid=4243)], made.START_S + 900)
    state = FoldedRun().after_all([*first, *again])
    assert state.processes == 2
    assert state.loss.buckets[-1].last == 80
    assert state.step is not None and state.step.step == 80
    assert [step.step for step in state.steps][-1] == 80
    assert [step for step, _ in state.evaluations] == [40, 80]
    assert state.memory is None and state.traffic is None  # samples of the old process


def test_a_resumed_run_that_knows_its_first_step_late_still_counts_each_step_once(
    made: ModuleType,
) -> None:
    early, late = made.hello(pid=4243), made.hello(pid=4243, first_step=80)
    again = made.stamped([early, late, made.step(81)], made.START_S + 900)
    state = FoldedRun().after_all([*made.training(90), *again])
    assert sum(bucket.count for bucket in state.loss.buckets) == 81
    assert [step.step for step in state.steps] == list(range(1, 82))


def test_a_run_started_over_forgets_its_first_life_at_its_first_step(made: ModuleType) -> None:
    again = made.stamped([made.hello(pid=4243), made.step(1)], made.START_S + 900)
    state = FoldedRun().after_all([*made.training(90), *again])
    assert [bucket.last for bucket in state.loss.buckets] == [1]
    assert list(state.evaluations) == [] and state.evaluation is None


def test_a_run_after_its_resume_is_not_failed_any_more(made: ModuleType) -> None:
    again = made.stamped([made.hello(first_step=80, pid=4243)], made.START_S + 900)
    state = FoldedRun().after_all([*made.failed(), *again])
    assert state.failed is None and state.done is None


def test_samples_of_a_live_pipe_are_thinned_for_charts_and_the_newest_is_shown(
    made: ModuleType,
) -> None:
    samples = made.stamped([made.memory(i) for i in range(600)], gap_s=0.1)
    traffic = made.stamped([made.traffic(i) for i in range(600)], gap_s=0.1)
    state = FoldedRun().after_all([*samples, *traffic])
    assert state.memory == samples[-1] and state.traffic == traffic[-1]
    for history in (list(state.memories), list(state.traffics)):
        gaps = [b.wall_s - a.wall_s for a, b in itertools.pairwise(history)]
        assert 110 <= len(history) <= 125 and min(gaps) > 0.4


# --- freshness ------------------------------------------------------------------------------------


def test_a_gauge_is_shown_until_its_limit_and_not_after(made: ModuleType) -> None:
    sample = replace(made.memory(), wall_s=100.0)
    limit = LIMITS_S[ev.MemorySampled]
    assert fresh(sample, 100.0 + limit) is sample
    assert fresh(sample, 100.1 + limit) is None


def test_a_slow_step_stays_true_for_longer(made: ModuleType) -> None:
    fast, slow = made.step(1, step_s=0.5), made.step(1, step_s=120.0)
    assert (limit_s(fast) or 0) < (limit_s(slow) or 0)
    assert fresh(replace(slow, wall_s=0.0), 500.0) is not None


# --- status ---------------------------------------------------------------------------------------

ALIVE = Link(process="alive")
DEAD = Link(process="dead")


def last_s(state: FoldedRun) -> float:
    assert state.last_wall_s is not None
    return state.last_wall_s


def test_a_run_without_events_is_waited_for_unless_its_process_died() -> None:
    assert status_of(FoldedRun(), ALIVE, 0.0).kind == "waiting"
    dead = status_of(FoldedRun(), Link(process="dead", last_words="no such model"), 0.0)
    assert dead.kind == "dead" and "no such model" in dead.detail


def test_a_living_run_is_running_then_stalled_when_silent(made: ModuleType) -> None:
    state = FoldedRun().after_all(made.training(10))
    now_s = last_s(state)
    assert status_of(state, ALIVE, now_s + 2).kind == "running"
    stalled = status_of(state, ALIVE, now_s + 60)
    assert stalled.kind == "stalled" and "1m 00s" in stalled.detail


def test_a_killed_run_is_dead_at_its_last_step(made: ModuleType) -> None:
    state = FoldedRun().after_all(made.training(10))
    status = status_of(state, DEAD, last_s(state) + 2)
    assert status.kind == "dead" and "4242" in status.detail and "step 10" in status.detail


def test_the_last_words_of_a_run_outweigh_its_missing_process(made: ModuleType) -> None:
    assert status_of(FoldedRun().after_all(made.finished()), DEAD, 1e12).kind == "finished"
    failed = status_of(FoldedRun().after_all(made.failed()), DEAD, 1e12)
    assert failed.kind == "failed" and "learning_rate" in failed.detail


@pytest.mark.parametrize("code", [130, 143])
def test_a_stopped_run_says_how_to_go_on(made: ModuleType, code: int) -> None:
    done = ev.Done(
        exit_code=code, step=9, seconds=9.0, loss=1.0, evaluation_loss=None, model_path=None,
        resume_with="fluxtrain train --resume auto",
    )  # fmt: skip
    status = status_of(FoldedRun().after_all([made.hello(), done]), DEAD, 0.0)
    assert status.kind == "stopped" and "--resume auto" in status.detail


@pytest.mark.parametrize("code", [130, 143])
def test_a_stopped_run_that_cannot_go_on_by_itself_does_not_say_that_nothing_was_kept(
    made: ModuleType, code: int
) -> None:
    before = made.training(10)  # of an earlier process: its checkpoints are still there
    done = ev.Done(
        exit_code=code, step=0, seconds=1.0, loss=None, evaluation_loss=None, model_path=None,
    )  # fmt: skip
    status = status_of(FoldedRun().after_all([*before, done]), DEAD, 0.0)
    assert status.kind == "stopped" and "no run.json" in status.detail
    assert "nothing" not in status.detail


def test_a_paused_run_says_so_and_other_phases_are_named(made: ModuleType) -> None:
    state = FoldedRun().after_all(made.training(3))
    paused = state.after(replace(ev.PhaseChanged(phase="paused"), wall_s=last_s(state)))
    assert status_of(paused, ALIVE, last_s(state)).kind == "paused"
    saving = state.after(replace(ev.PhaseChanged(phase="saving"), wall_s=last_s(state)))
    assert status_of(saving, ALIVE, last_s(state)).word == "SAVING"


def test_a_run_that_waits_for_room_on_its_disk_says_so_as_a_warning(made: ModuleType) -> None:
    state = FoldedRun().after_all(made.training(3))
    told = ev.PhaseChanged(phase="no space", detail="waiting up to 10m for room")
    status = status_of(state.after(replace(told, wall_s=last_s(state))), ALIVE, last_s(state))
    assert (status.kind, status.word) == ("running", "NO SPACE") and "for room" in status.detail
    assert [role for _, role in badge(status)] == ["warn", "warn"]


def test_an_unreadable_journal_is_told_before_all_else(made: ModuleType) -> None:
    status = status_of(FoldedRun().after_all(made.finished()), Link(problem="schema 2.0"), 0.0)
    assert status.kind == "unreadable" and status.detail == "schema 2.0"


# --- the view -------------------------------------------------------------------------------------


def test_an_ended_run_is_seen_as_it_was_at_its_end(made: ModuleType) -> None:
    state = FoldedRun().after_all(made.finished())
    view = View(state=state, wall_s=last_s(state) + 1e6)
    assert view.now_s == last_s(state)
    assert view.fresh(state.memory) is state.memory


def test_a_killed_runs_samples_turn_stale(made: ModuleType) -> None:
    state = FoldedRun().after_all(made.training(10))
    view = View(state=state, link=DEAD, wall_s=last_s(state) + 60)
    assert view.fresh(state.memory) is None and view.fresh(state.traffic) is None
    assert view.age_s(state.memory) == pytest.approx(60, abs=1)


def test_a_machine_sample_is_shown_for_seconds_only(made: ModuleType) -> None:
    from fluxtui.state.machine_sample import MachineSample

    sample = MachineSample(100.0, 0.5, 2, 1, 2, None, None)
    assert View(machine_sample=sample, monotonic_s=104.0).machine is sample
    assert View(machine_sample=sample, monotonic_s=106.0).machine is None
    assert {field.name for field in fields(MachineSample)} >= {"cpu", "gpus", "trainer_rss_bytes"}


# --- what each event becomes in words -------------------------------------------------------------


@pytest.mark.parametrize(
    ("event", "level", "text"),
    [
        (ev.PhaseChanged(phase="saving", detail="the trained model"), "info",
         "saving: the trained model"),
        (ev.EvaluationFinished(step=4, loss=2.5, count=9, seconds=2.0), "info",
         "step 4: held-out loss 2.5000 in 2.00 s"),
        (ev.CheckpointWritten(step=4, path="x", bytes=1 << 20, seconds=0.5), "info",
         "step 4: checkpoint of 1.00 MiB in 500 ms"),
        (ev.SampleGenerated(step=4, prompt="Return", text=" the\nlist"), "info",
         'step 4: "Return" -> " the\\nlist"'),
        (ev.LogWritten(level="warning", text="slow disk"), "warning", "slow disk"),
        (ev.CommandAnswered(command="pause", ok=False, message="saving"), "warning",
         "pause: saving"),
        (ev.CommandAnswered(command="pause", ok=True, message="after step 5"), "info",
         "pause: after step 5"),
        (ev.Failed(exit_code=5, kind="NoSpace", message="disk full"), "error",
         "NoSpace: disk full"),
    ],
)  # fmt: skip
def test_an_event_is_told_in_words(event: ev.AnyEvent, level: str, text: str) -> None:
    newest = FoldedRun().after(event).log.newest
    assert newest is not None
    assert (newest.level, newest.text) == (level, text)


@pytest.mark.parametrize("kind", sorted(LIMITS_S, key=str))
def test_samples_are_no_lines_of_the_log(made: ModuleType, kind: Any) -> None:
    measuring = ev.MeasuringChange(name="prefetch", counted=1, wanted=20)
    samples = [event for event in [*made.training(5), measuring] if isinstance(event, kind)]
    assert samples
    assert len(FoldedRun().after_all(samples).log) == 0
