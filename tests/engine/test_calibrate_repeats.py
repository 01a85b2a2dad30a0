"""Resident and streamed steps are timed in turn until two repeats agree."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fluxtrain.measure import repeats as repeats_module
from fluxtrain.measure.block_timing import BlockTimes
from fluxtrain.measure.repeats import (
    MOST_REPEATS,
    REPEATS_S,
    Repeat,
    Repeats,
    agree,
    until_agreed,
)

steps_s = st.floats(0.1, 10)


def one_repeat(resident_s: float, streamed_s: float) -> Repeat:
    sizes = {"many": BlockTimes(4, {"whole": [resident_s, 2 * resident_s]})}
    return Repeat(sizes=sizes, streamed_s=[2 * streamed_s, streamed_s], copied_bytes=0)


def made(
    monkeypatch: pytest.MonkeyPatch,
    found: list[tuple[float, float]],
    *,
    takes_s: float = 0.1,
    others: float | None = 0.0,
) -> tuple[Repeats, int]:
    """Return the repeats that give the seconds `found`, and how many were made."""
    monkeypatch.setattr(repeats_module, "others_share", lambda _: others)
    monkeypatch.setattr(repeats_module, "MOST_REPEATS", MOST_REPEATS)  # other tests make one
    now = [0.0]
    left: Iterator[tuple[float, float]] = iter(found)
    count = 0

    def next_repeat(is_first: bool) -> Repeat:
        nonlocal count
        assert is_first == (count == 0)
        now[0] += takes_s
        count += 1
        return one_repeat(*next(left))

    return until_agreed(next_repeat, clock=lambda: now[0]), count


def test_two_repeats_that_found_the_same_are_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    repeats, count = made(monkeypatch, [(0.2, 0.23), (0.201, 0.229)])
    assert count == 2
    assert repeats.longer_s() == pytest.approx(0.229 - 0.2)


def test_a_repeat_that_was_slow_throughout_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    slow_streams, slow_resident = (0.2, 0.41), (0.3, 0.23)
    repeats, count = made(monkeypatch, [slow_streams, slow_resident, (0.204, 0.232)])
    assert count == 3
    assert repeats.longer_s() == pytest.approx(0.23 - 0.2)


def test_repeats_end_when_there_is_no_time_for_another(monkeypatch: pytest.MonkeyPatch) -> None:
    _, count = made(monkeypatch, [(1, 2), (2, 3), (3, 4), (4, 5)], takes_s=0.6 * REPEATS_S)
    assert count == 2
    _, count = made(monkeypatch, [(1.0, 2.0)], takes_s=1.1 * REPEATS_S)
    assert count == 1
    never_alike = [(2.0**i, 3.0**i) for i in range(9)]
    _, count = made(monkeypatch, never_alike)
    assert count == MOST_REPEATS


@pytest.mark.parametrize(("others", "counts"), [(0.0, True), (None, True), (0.5, False)])
def test_repeats_that_disagree_say_nothing_of_streaming_where_other_programs_ran(
    monkeypatch: pytest.MonkeyPatch, others: float | None, counts: bool
) -> None:
    repeats, _ = made(monkeypatch, [(0.2, 2.5)], takes_s=1.1 * REPEATS_S, others=others)
    assert (repeats.longer_s() is not None) == counts
    alike, _ = made(monkeypatch, [(0.2, 0.25), (0.2, 0.25)], others=others)
    assert alike.longer_s() == pytest.approx(0.05)


@given(st.lists(st.tuples(steps_s, steps_s), min_size=1, max_size=5), steps_s, steps_s)
def test_slower_repeats_never_undo_an_agreement(
    found: list[tuple[float, float]], resident_s: float, streamed_s: float
) -> None:
    if agree(found):
        slowest = [max(seconds) for seconds in zip(*found, strict=True)]
        assert agree([*found, (slowest[0] + resident_s, slowest[1] + streamed_s)])


def test_the_steps_of_all_repeats_are_added() -> None:
    few, many = BlockTimes(1, {"whole": [0.1]}, 700), BlockTimes(4, {"whole": [0.2]}, 800)
    first = Repeat(sizes={"few": few, "many": many}, streamed_s=[1.0], copied_bytes=0)
    found = Repeats([first, one_repeat(0.3, 1.0)], None).sizes()
    assert found["many"] == BlockTimes(4, {"whole": [0.2, 0.3, 0.6]}, 800)
    assert found["few"] == few
    assert many.seconds == {"whole": [0.2]}
