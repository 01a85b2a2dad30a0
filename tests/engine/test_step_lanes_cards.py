"""The lanes of steps on two cards that are pretended on the CPU."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fluxtrain.core.device.recorder import Border, Recorder
from fluxtrain.events.trace.attribution import attribute
from fluxtrain.events.trace.lanes import StepLanes
from fluxtrain.train.observe.timeline import StepCutter
from tests.on_cards import batch, llama, wrapped


def recorded(steps: int = 3, **how: Any) -> list[StepLanes]:
    model = llama()
    engine = wrapped(model, 2, **how)
    recorder = engine.device.recorder
    cutter, found = StepCutter(recorder), []
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    for step in range(1, steps + 1):
        recorder.begin_step(step)
        model(**batch(step)).loss.backward()
        engine.clip_grad_norm(1.0)
        optimizer.step()
        optimizer.zero_grad()
        found += cutter.ready()
    engine.flush()
    recorder.end_step()
    while recorder.notes:
        found += cutter.ready()
        time.sleep(0.001)
    engine.close()
    return found


def test_each_block_is_in_the_lanes_of_its_card_and_the_seconds_add_up() -> None:
    steps = recorded()
    assert [step.step for step in steps] == [1, 2, 3]
    dealt = {f"model.layers.{at}": at % 2 for at in range(5)}
    copied: dict[str, int] = {}
    for step in steps:
        for lane, kind in (("gpu", "forward"), ("gpu", "backward"), ("h2d", "weights")):
            where = {
                one.name: one.card
                for one in step.intervals
                if (one.lane, one.kind) == (lane, kind) and "layers" in one.name
            }
            if lane == "h2d":  # in which step is open: blocks are copied ahead of theirs
                assert where.items() <= dealt.items()
                copied |= where
            else:
                assert where == dealt, (lane, kind)
        assert {one.card for one in step.intervals if one.lane in ("cpu", "host")} <= {0}
        for card in attribute(step).cards:
            assert card.busy_s["gpu"] + sum(card.waits_s.values()) == pytest.approx(step.length_s)
            assert card.for_others_s > 0  # one thread computes for both
    assert copied == dealt


class FakeClock:
    """A card whose events pass when the test says so; they are as late as the card is."""

    on_host = False

    def __init__(self, late_s: float) -> None:
        self.late_s, self.now_s, self.through_s = late_s, 0.0, 0.0

    def instant(self) -> Any:
        return SimpleNamespace(at_s=self.now_s)

    def border(self, step: int) -> Border:
        return Border(step, self.instant(), self.now_s, self.now_s)

    def passed(self, border: Border) -> bool:
        return bool(border.instant.at_s <= self.through_s)

    def anchor_at(self, border: Border) -> float | None:
        return self.seconds(border.instant) if self.passed(border) else None

    def seconds(self, instant: Any) -> float | None:
        return instant.at_s + self.late_s if instant.at_s <= self.through_s else None

    def queued_s(self, instant: Any) -> float | None:
        return None

    def give_back(self, instant: Any) -> None:
        pass


def test_a_cards_times_are_by_its_own_clock_and_a_step_ends_when_all_cards_have_passed() -> None:
    clocks: list[Any] = [FakeClock(0.0), FakeClock(0.5)]
    first, second = (Recorder(clock) for clock in clocks)
    first.lead([second])
    cutter = StepCutter(first)

    def at(seconds: float) -> None:
        for clock in clocks:
            clock.now_s = seconds

    first.begin_step(1)
    at(1.0)
    starts = first.instant(), second.instant()
    at(2.0)
    first.computed("forward", "a", starts[0])
    second.computed("forward", "b", starts[1])
    second.waited("cards", starts[1])
    at(4.0)
    short = second.instant()
    second.waited("cards", short)
    first.end_step()
    clocks[0].through_s = 9.0
    assert cutter.ready() == []  # the second card has not come so far
    clocks[1].through_s = 9.0
    (step,) = cutter.ready()
    found = [(one.card, one.kind, one.start_s, one.duration_s) for one in step.intervals]
    assert (step.length_s, found) == (
        4.0, [(0, "forward", 1.0, 1.0), (1, "forward", 1.5, 1.0), (1, "cards", 1.5, 1.0)],
    )  # fmt: skip
