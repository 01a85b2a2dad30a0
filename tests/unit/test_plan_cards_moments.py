"""When the moments of several cards are updated."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from fluxtrain.plan.cards import choose
from fluxtrain.plan.cards.choose import place_on_cards
from fluxtrain.plan.cards.pipeline import PipelineTime
from fluxtrain.plan.footprint import Layout
from tests.unit.test_plan_cards_choose import FIXED, MODEL, SET, TWO, machine, told


@pytest.mark.parametrize(("of_the_time", "deferred"), [(0.998, True), (1.0, False), (1.002, False)])
def test_they_are_deferred_for_any_gain(
    monkeypatch: pytest.MonkeyPatch, of_the_time: float, deferred: bool
) -> None:
    real = choose._Chooser._time

    def timed(self: Any, positions: Any, dealt: Any, layouts: list[Layout], head: Any) -> Any:
        later = layouts[0].deferred_moments
        at_once = [replace(layout, deferred_moments=False) for layout in layouts]
        found = real(self, positions, dealt, at_once, head)
        assert isinstance(found, PipelineTime)
        return replace(found, step_s=found.step_s * of_the_time) if later else found

    monkeypatch.setattr(choose._Chooser, "_time", timed)
    found = place_on_cards(MODEL, machine(8, 8), TWO, SET, FIXED)
    assert found.deferred_moments is deferred
    why = "a step is predicted to be shorter" if deferred else "no gain is predicted otherwise"
    assert told(found, "train.moments")[1] == why
