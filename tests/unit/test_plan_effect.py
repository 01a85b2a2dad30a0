"""What a change was worth is a comparison of medians, and advice is held to its word."""

from __future__ import annotations

import pytest

from fluxtrain.train.live.effect import FEWEST_STEPS, STEPS, Effect


def effect(before: list[float], after: list[float], predicted: float | None = None) -> Effect:
    found = Effect(before_s=tuple(before), predicted_gain=predicted)
    for step_s in after:
        found = found.after_step(step_s)
    return found


def test_the_gain_is_the_share_of_the_median_step_that_was_saved() -> None:
    found = effect([1.0, 1.1, 9.0, 1.0, 1.1], [0.88, 0.8, 5.0])
    assert found.gain == pytest.approx(0.2)
    assert effect([1.0] * 5, [1.5] * 5).gain == pytest.approx(-0.5)


@pytest.mark.parametrize(
    ("after_s", "predicted", "verdict"),
    [
        (0.80, 0.2, "kept"),
        (0.89, 0.2, "kept"),
        (0.91, 0.2, "wrong"),
        (1.20, 0.2, "wrong"),
        (1.20, None, "measured"),
    ],
)
def test_less_than_half_of_the_predicted_gain_is_wrong(
    after_s: float, predicted: float | None, verdict: str
) -> None:
    assert effect([1.0] * 20, [after_s] * 20, predicted).verdict == verdict


def test_too_few_steps_on_a_side_give_no_verdict() -> None:
    few = [1.0] * (FEWEST_STEPS - 1)
    assert effect(few, [0.5] * 20, 0.2).verdict == "unknown"
    assert effect([1.0] * 20, few, 0.2).gain is None
    assert effect([], []).median_before_s is None


def test_it_is_complete_after_twenty_steps() -> None:
    found = effect([1.0] * STEPS, [1.0] * (STEPS - 1))
    assert not found.complete
    assert found.after_step(1.0).complete
    assert found.counted == STEPS - 1
