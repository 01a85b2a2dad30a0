"""Resident and streamed steps of a miniature in turn: what counts is what two rounds found."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fluxtrain.calibration import repeats as rounds_module
from fluxtrain.calibration.block_timing import Trial
from fluxtrain.calibration.repeats import MOST_ROUNDS, ROUNDS_S, Round, Rounds, agree, until_agreed

steps_s = st.floats(0.1, 10)


def one_round(resident_s: float, streamed_s: float) -> Round:
    trials = {"many": Trial(4, {"whole": [resident_s, 2 * resident_s]})}
    return Round(trials=trials, streamed_s=[2 * streamed_s, streamed_s], copied_bytes=0)


def made(
    monkeypatch: pytest.MonkeyPatch,
    found: list[tuple[float, float]],
    *,
    takes_s: float = 0.1,
    others: float | None = 0.0,
) -> tuple[Rounds, int]:
    """What rounds that find this give, and how many were made."""
    monkeypatch.setattr(rounds_module, "others_share", lambda _: others)
    monkeypatch.setattr(rounds_module, "MOST_ROUNDS", MOST_ROUNDS)  # other tests make one
    now = [0.0]
    left: Iterator[tuple[float, float]] = iter(found)
    count = 0

    def next_round(is_first: bool) -> Round:
        nonlocal count
        assert is_first == (count == 0)
        now[0] += takes_s
        count += 1
        return one_round(*next(left))

    return until_agreed(next_round, clock=lambda: now[0]), count


def test_two_rounds_that_found_the_same_are_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    rounds, count = made(monkeypatch, [(0.2, 0.23), (0.201, 0.229)])
    assert count == 2
    assert rounds.longer_s() == pytest.approx(0.229 - 0.2)


def test_a_round_that_was_slow_throughout_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    slow_streams, slow_resident = (0.2, 0.41), (0.3, 0.23)
    rounds, count = made(monkeypatch, [slow_streams, slow_resident, (0.204, 0.232)])
    assert count == 3
    assert rounds.longer_s() == pytest.approx(0.23 - 0.2)


def test_rounds_end_when_there_is_no_time_for_another(monkeypatch: pytest.MonkeyPatch) -> None:
    _, count = made(monkeypatch, [(1, 2), (2, 3), (3, 4), (4, 5)], takes_s=0.6 * ROUNDS_S)
    assert count == 2
    _, count = made(monkeypatch, [(1.0, 2.0)], takes_s=1.1 * ROUNDS_S)
    assert count == 1
    never_alike = [(2.0**i, 3.0**i) for i in range(9)]
    _, count = made(monkeypatch, never_alike)
    assert count == MOST_ROUNDS


@pytest.mark.parametrize(("others", "counts"), [(0.0, True), (None, True), (0.5, False)])
def test_rounds_that_disagree_say_nothing_of_streaming_where_other_programs_ran(
    monkeypatch: pytest.MonkeyPatch, others: float | None, counts: bool
) -> None:
    rounds, _ = made(monkeypatch, [(0.2, 2.5)], takes_s=1.1 * ROUNDS_S, others=others)
    assert (rounds.longer_s() is not None) == counts
    alike, _ = made(monkeypatch, [(0.2, 0.25), (0.2, 0.25)], others=others)
    assert alike.longer_s() == pytest.approx(0.05)


@given(st.lists(st.tuples(steps_s, steps_s), min_size=1, max_size=5), steps_s, steps_s)
def test_slower_rounds_never_undo_an_agreement(
    found: list[tuple[float, float]], resident_s: float, streamed_s: float
) -> None:
    if agree(found):
        slowest = [max(seconds) for seconds in zip(*found, strict=True)]
        assert agree([*found, (slowest[0] + resident_s, slowest[1] + streamed_s)])


def test_the_steps_of_all_rounds_are_one_trial() -> None:
    few, many = Trial(1, {"whole": [0.1]}, 700), Trial(4, {"whole": [0.2]}, 800)
    first = Round(trials={"few": few, "many": many}, streamed_s=[1.0], copied_bytes=0)
    found = Rounds([first, one_round(0.3, 1.0)], None).trials()
    assert found["many"] == Trial(4, {"whole": [0.2, 0.3, 0.6]}, 800)
    assert found["few"] == few
    assert many.seconds == {"whole": [0.2]}
