"""What is asked for is judged, made between two steps, measured, and undone when it was wrong."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from fluxtrain.errors import DoesNotFit
from fluxtrain.events import events as ev
from fluxtrain.plan.placement import Placement
from fluxtrain.train.live.adviser import Setup
from fluxtrain.train.live.changes import CALM_STEPS, STEPS, LiveChanges
from fluxtrain.train.live.edit import MemoryInUse
from fluxtrain.train.live.live_run import LiveRun
from fluxtrain.train.live.settings import LiveSettings
from fluxtrain.train.live.setup import promise_of
from fluxtrain.train.placing.prediction import Promise
from fluxtrain.units import GIB, MIB
from tests.unit.live_ground import BLOCK_BYTES, BLOCKS, RATES, ground


class Run:
    """A loop without an engine: steps take as long as the settings say."""

    def __init__(self, **setup: Any) -> None:
        self.events: list[Any] = []
        self.turned: list[dict[str, int]] = []
        self.chunk_rows, self.step = 2, 0
        self.use = MemoryInUse()
        self.refuse = False
        self.step_s: Callable[[dict[str, int]], float] = lambda now: 1.0
        self.stalls: dict[str, float] = {}
        self.live = LiveChanges(
            replace(Setup(run=ground(), passes=1, clips=False, rates=None), **setup),
            self,  # type: ignore[arg-type]
            self.turn,
            chunk_rows=lambda: self.chunk_rows,
            memory=lambda: self.use,
            promise_of=self.promise_of,
        )

    def promise_of(self, _: LiveRun, settings: LiveSettings) -> Promise:
        """The more is resident, the more memory and the less time."""
        resident = settings.value("resident_blocks")
        size = resident * BLOCK_BYTES
        return Promise(
            device_bytes=GIB + size,
            host_bytes=2 * GIB - size,
            step_s=2.0 - resident,
        )

    def emit(self, event: ev.Event) -> None:
        self.events.append(event)

    gauge = emit

    def turn(self, placement: Placement) -> None:
        if self.refuse:
            raise DoesNotFit("CUDA out of memory")
        assert placement.chunk_rows is not None
        self.chunk_rows = placement.chunk_rows
        now = {
            "slots": placement.slots,
            "resident_blocks": placement.totals.resident_blocks,
            "chunk_rows": placement.chunk_rows,
        }
        self.turned.append(now)

    def steps(self, count: int) -> None:
        for _ in range(count):
            self.live.carry_out(self.step, lambda: None)
            self.step += 1
            now = self.turned[-1] if self.turned else {}
            self.live.step_took(
                ev.StepFinished(
                    step=self.step,
                    total_steps=999,
                    epoch=0.0,
                    loss=1.0,
                    learning_rate=0.1,
                    grad_norm=1.0,
                    tokens=1,
                    total_tokens=1,
                    step_s=self.step_s(now),
                    tokens_per_s=1.0,
                    phases_s={"forward": 0.3, "backward": 0.7},
                    stalls_s=self.stalls,
                )
            )

    def told(self, kind: type[Any]) -> list[Any]:
        return [event for event in self.events if isinstance(event, kind)]

    def ask(self, **arguments: Any) -> tuple[bool, str]:
        return self.live.ask("apply", arguments)


def advised(faster_s: float) -> Run:
    """A run that waits for weights, was told so, and whose step takes `faster_s` when it obeys."""
    run = Run()
    run.stalls = {"weights": 0.4}
    run.step_s = lambda now: faster_s if now.get("resident_blocks") else 1.0
    run.steps(STEPS + 2)
    return run


def test_a_change_waits_for_the_end_of_the_step_and_is_told() -> None:
    run = Run()
    run.steps(3)
    assert run.ask(prefetch=4) == (True, "prefetch goes from 2 to 4 after this step")
    assert not run.turned
    run.steps(1)
    assert run.turned == [{"slots": 5, "resident_blocks": 0, "chunk_rows": 2}]
    (applied,) = run.told(ev.ChangeApplied)
    assert (applied.step, applied.name, applied.before, applied.after) == (3, "prefetch", 2, 4)
    assert (applied.why, applied.same_bits) == ("asked", True)
    assert run.live.settings.prefetch == 4


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"prefetch": 99}, "8 blocks stream"),
        ({"dance": 1}, "cannot change while a run trains"),
        ({"advice": "resident"}, "no advice 'resident': none holds now"),
        ({}, "one change at a time"),
    ],
)
def test_what_is_impossible_is_refused_at_once_and_changes_nothing(
    arguments: dict[str, Any], reason: str
) -> None:
    run = Run()
    ok, message = run.ask(**arguments)
    assert not ok
    assert reason in message
    run.steps(2)
    assert not run.turned
    assert not run.told(ev.ChangeApplied)


def test_running_out_while_applying_is_told_and_leaves_the_settings() -> None:
    run = Run()
    assert run.ask(resident_blocks=3)[0]
    run.refuse = True
    run.steps(1)
    (refused,) = run.told(ev.ChangeRefused)
    assert (refused.name, refused.value) == ("resident_blocks", 3)
    assert "out of memory" in refused.because
    assert not run.told(ev.ChangeApplied)
    assert run.live.settings.value("resident_blocks") == 0
    assert not run.live.ask("undo", {})[0]


def test_a_change_is_measured_over_twenty_steady_steps_on_each_side() -> None:
    run = Run()
    run.step_s = lambda now: 0.8 if now.get("slots") == 5 else 1.0
    run.steps(30)
    run.ask(prefetch=4)
    run.steps(STEPS)
    assert not run.told(ev.ChangeMeasured)
    assert run.told(ev.MeasuringChange)[-1].counted == STEPS - 1
    run.steps(1)
    (measured,) = run.told(ev.ChangeMeasured)
    assert measured.measured_gain == pytest.approx(0.2)
    assert (measured.steps_before, measured.steps_after) == (STEPS, STEPS)
    assert (measured.before_s, measured.after_s) == (1.0, 0.8)
    assert measured.verdict == "measured"
    assert run.live.settings.prefetch == 4


def test_steps_around_evaluations_checkpoints_and_pauses_do_not_count() -> None:
    run = Run()
    disturbed = 0.0
    run.step_s = lambda now: 50.0 if disturbed else 1.0
    run.steps(5)
    run.ask(prefetch=4)
    run.steps(2)
    for _ in range(STEPS - 1):
        run.live.disturbed()
        disturbed = 1.0
        run.steps(1)
        disturbed = 0.0
        run.steps(1)
    (measured,) = run.told(ev.ChangeMeasured)
    assert (measured.before_s, measured.after_s) == (1.0, 1.0)


def test_a_stalled_run_is_advised_with_a_gain_and_a_change_to_apply() -> None:
    run = advised(0.8)
    advice = {given.id: given for given in run.told(ev.AdviceGiven)}
    assert advice["resident"].apply == {"resident_blocks": BLOCKS}
    assert advice["resident"].gain_share == pytest.approx(0.2)
    assert advice["rows"].apply == {}
    assert advice["rows"].how == "train.batch_rows=16"
    count = len(run.told(ev.AdviceGiven))
    run.steps(2 * STEPS)
    assert len(run.told(ev.AdviceGiven)) == count  # said once while it stays so


def test_advice_that_keeps_its_word_stays() -> None:
    run = advised(0.85)
    assert run.ask(advice="resident")[0]
    run.steps(STEPS + 2)
    (measured,) = run.told(ev.ChangeMeasured)
    assert (measured.verdict, measured.advice) == ("kept", "resident")
    assert measured.predicted_gain == pytest.approx(0.2)
    assert measured.measured_gain == pytest.approx(0.15)
    assert run.live.settings.value("resident_blocks") == BLOCKS
    assert ev.AdviceWithdrawn(id="resident") in run.events


def test_advice_that_gave_less_than_half_is_undone_and_not_said_again() -> None:
    run = advised(0.95)
    run.ask(advice="resident")
    run.steps(STEPS + 2)
    assert run.told(ev.ChangeMeasured)[0].verdict == "wrong"
    made, undone = run.told(ev.ChangeApplied)
    assert (made.why, undone.why) == ("advice", "wrong")
    assert (undone.before, undone.after) == (BLOCKS, 0)
    assert run.live.settings.value("resident_blocks") == 0
    run.events.clear()
    run.steps(3 * STEPS)
    assert all(given.id != "resident" for given in run.told(ev.AdviceGiven))
    assert not run.live.ask("undo", {})[0]


def test_advice_waits_while_the_last_change_is_measured_and_is_refused_for_the_next_run() -> None:
    run = advised(0.8)
    run.ask(prefetch=3)
    run.steps(8)
    ok, message = run.ask(advice="resident")
    assert (ok, "prefetch=3 is measured (7 of 20 steps)" in message) == (False, True)
    ok, message = run.ask(advice="rows")
    assert (ok, "for the next run: train.batch_rows=16" in message) == (False, True)


def test_undo_takes_back_one_change_after_the_other() -> None:
    run = Run()
    for change in ({"prefetch": 4}, {"resident_blocks": 2}):
        run.ask(**change)
        run.steps(2)
    for name, value in (("resident_blocks", 0), ("prefetch", 2)):
        assert run.live.ask("undo", {})[0]
        run.steps(1)
        last = run.told(ev.ChangeApplied)[-1]
        assert (last.name, last.after, last.why) == (name, value, "undo")
    ok, message = run.live.ask("undo", {})
    assert (ok, "nothing was changed since" in message) == (False, True)
    assert run.live.settings == ground().planned


def test_block_inputs_on_the_device_leave_it_when_its_memory_runs_out() -> None:
    run = Run()
    assert run.live.make_room(4, lost_s=2.0) == f"activations_on_device 0 instead of {BLOCKS}"
    applied = run.told(ev.ChangeApplied)[-1]
    assert (applied.name, applied.why, applied.same_bits) == (
        "activations_on_device", "memory", True
    )  # fmt: skip
    assert run.live.settings.value("activations_on_device") == 0
    assert run.live.make_room(4, lost_s=2.0) == "chunks of 1 rows instead of 2"
    full = Run(run=ground())
    full.use = MemoryInUse(host_available_bytes=10 * MIB)
    assert full.live.make_room(4, lost_s=2.0) == "chunks of 1 rows instead of 2"


def test_what_others_took_is_given_up_before_the_step_and_taken_again_after_calm_ones() -> None:
    run = Run(run=ground(resident_blocks=3))
    before = run.live.settings
    peak_bytes = run.live._run.device_bytes(before, 0)
    run.live.keep_room(0, [-GIB], lambda: None)
    assert run.told(ev.ChangeApplied) == [] and run.live.settings == before
    run.live.keep_room(0, [100 * MIB], lambda: None)
    given_up = run.told(ev.ChangeApplied)
    assert {change.why for change in given_up} == {"memory"}
    assert run.live._run.device_bytes(run.live.settings, 0) <= peak_bytes - 100 * MIB
    freed = peak_bytes - run.live._run.device_bytes(run.live.settings, 0)
    for _ in range(2 * CALM_STEPS):
        run.live.keep_room(1, [-1], lambda: None)  # there is room, for less than was given up
    assert len(run.told(ev.ChangeApplied)) == len(given_up)
    for _ in range(CALM_STEPS - 1):
        run.live.keep_room(2, [-freed], lambda: None)
    run.live.keep_room(2, [0], lambda: None)  # one step is not calm: counted from the beginning
    for _ in range(CALM_STEPS + len(given_up) - 1):
        assert run.live.settings != before
        run.live.keep_room(3, [-freed], lambda: None)
    assert run.live.settings == before
    back = [one for one in run.told(ev.ChangeApplied) if one.why == "room"]
    assert [(one.name, one.before, one.after) for one in back] == [
        (one.name, one.after, one.before) for one in reversed(given_up)
    ]


def test_a_chunk_that_ran_out_is_told_as_a_change_and_advised_for_the_next_run() -> None:
    run = Run(run=ground(activations="host"))
    run.ask(chunk_rows=8)
    run.steps(4)
    assert run.live.make_room(4, lost_s=2.0) == "chunks of 4 rows instead of 8"
    assert run.chunk_rows == 4
    applied = run.told(ev.ChangeApplied)[-1]
    assert (applied.why, applied.before, applied.after) == ("memory", 8, 4)
    (advice,) = [given for given in run.told(ev.AdviceGiven) if given.id == "redone"]
    assert advice.how == "placement.chunk_rows=4"
    assert advice.gain_share is not None
    assert 0 < advice.gain_share <= 1
    assert not run.live.ask("undo", {})[0]  # back to what ran out is no cure


def test_below_one_row_resident_blocks_go_then_parts_of_the_device_then_nothing() -> None:
    how: Any = {"chunk_rows": 1, "resident_blocks": 3, "device_groups": 2, "activations": "host"}
    run = Run(run=ground(**how))
    run.chunk_rows = 1
    said = [run.live.make_room(0, lost_s=1.0) for _ in range(5)]
    assert said == [
        "resident_blocks 1 instead of 3",
        "resident_blocks 0 instead of 1",
        "device_groups 1 instead of 2",
        "device_groups 0 instead of 1",
        None,
    ]
    assert {change.why for change in run.told(ev.ChangeApplied)} == {"memory"}
    assert run.live.settings == replace(ground(activations="host").planned, chunk_rows=1)


def test_the_times_of_a_change_follow_the_last_run_as_those_of_the_plan_do() -> None:
    setup = Setup(run=ground(), passes=1, clips=False, rates=RATES)
    once = promise_of(setup, setup.run, setup.run.planned)
    slower = promise_of(replace(setup, run_times=2.0), setup.run, setup.run.planned)
    assert once.step_s is not None and once.tokens_per_s is not None
    assert slower.step_s == 2 * once.step_s and slower.tokens_per_s == once.tokens_per_s / 2
