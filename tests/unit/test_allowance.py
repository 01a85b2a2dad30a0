"""Turns are given as often as they are allowed, whatever the intervals between the requests."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from fluxtrain.train.requests import Allowance


def test_a_burst_is_allowed_and_then_a_rate() -> None:
    now_s = 0.0
    allowance = Allowance(per_s=2.0, burst=3, clock=lambda: now_s)
    assert [allowance.take() for _ in range(4)] == [True, True, True, False]
    now_s = 0.5
    assert [allowance.take() for _ in range(2)] == [True, False]
    now_s = 100.0
    assert [allowance.take() for _ in range(4)] == [True, True, True, False]


@given(
    waits_s=st.lists(st.floats(-1.0, 5.0), max_size=60),
    per_s=st.floats(0.1, 50.0),
    burst=st.integers(1, 9),
)
def test_no_pattern_of_requests_gets_more_than_burst_and_rate(
    waits_s: list[float], per_s: float, burst: int
) -> None:
    now_s, taken, passed_s = 0.0, 0, 0.0
    allowance = Allowance(per_s, burst, clock=lambda: now_s)
    for wait_s in waits_s:
        now_s += wait_s  # also backwards: no clock of ours is, and it must give nothing
        passed_s += max(0.0, wait_s)
        while allowance.take():
            taken += 1
            assert taken <= burst + per_s * passed_s + 1e-6
