"""Histories and curves: bounded, pure, and true to what went in."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fluxtui.state.history import Curve, History


@given(st.lists(st.integers(), max_size=300), st.integers(1, 40))
def test_a_history_holds_the_last_items_in_order(items: list[int], limit: int) -> None:
    history: History[int] = History(limit)
    for item in items:
        history = history.appended(item)
    assert list(history) == items[-limit:]
    assert len(history) == min(limit, len(items))
    assert history.newest == (items[-1] if items else None)
    assert history.last(3) == items[-limit:][-3:]


@given(st.lists(st.integers(), min_size=1, max_size=60), st.integers(1, 10), st.data())
def test_appending_never_changes_an_older_history(
    items: list[int], limit: int, data: st.DataObject
) -> None:
    versions: list[History[int]] = [History(limit)]
    contents: list[list[int]] = [[]]
    for item in items:
        at = data.draw(st.integers(0, len(versions) - 1))  # also branches off old versions
        versions.append(versions[at].appended(item))
        contents.append([*contents[at], item][-limit:])
    assert [list(version) for version in versions] == contents


def test_a_long_history_does_not_keep_what_it_forgot() -> None:
    history: History[int] = History(10)
    for i in range(10_000):
        history = history.appended(i)
    assert len(history._items) < 100


@settings(max_examples=50)
@given(st.lists(st.floats(-1e3, 1e3), min_size=1, max_size=900))
def test_a_curve_keeps_every_value_in_some_bucket(values: list[float]) -> None:
    curve = Curve(limit=128)
    for step, value in enumerate(values, start=1):
        curve = curve.with_value(step, value)
    buckets = curve.buckets
    assert sum(bucket.count for bucket in buckets) == len(values)
    assert math.isclose(sum(bucket.total for bucket in buckets), sum(values), abs_tol=1e-6)
    assert min(bucket.low for bucket in buckets) == min(values)
    assert max(bucket.high for bucket in buckets) == max(values)
    edges = [edge for bucket in buckets for edge in (bucket.first, bucket.last)]
    assert edges == sorted(edges) and edges[0] == 1 and edges[-1] == len(values)


def test_a_curve_of_a_million_steps_stays_bounded_and_covers_them_all() -> None:
    curve = Curve(limit=256)
    for step in range(1, 200_001):
        curve = curve.with_value(step, 1.0)
    assert len(curve.buckets) < 2 * 256
    assert (curve.buckets[0].first, curve.buckets[-1].last) == (1, 200_000)


def test_the_moving_average_of_a_constant_is_the_constant_from_the_first_step() -> None:
    curve = Curve()
    for step in range(1, 50):
        curve = curve.with_value(step, 2.5)
        assert curve.smooth == pytest.approx(2.5)


def test_a_loss_that_is_not_finite_is_left_out_of_the_curve() -> None:
    curve = Curve().with_value(1, 3.0).with_value(2, math.nan).with_value(3, math.inf)
    assert [bucket.last for bucket in curve.buckets] == [1]


def test_cutting_a_curve_forgets_the_later_steps() -> None:
    curve = Curve()
    for step in range(1, 101):
        curve = curve.with_value(step, 10.0 - step * 0.05)
    cut = curve.until(40)
    assert cut.buckets[-1].last == 40
    assert cut.smooth == pytest.approx(cut.buckets[-1].smooth)
    assert curve.until(100) is curve


def test_cutting_a_curve_to_nothing_gives_an_empty_curve() -> None:
    cut = Curve().with_value(1, 1.0).until(0)
    assert cut.buckets == () and cut.smooth is None
