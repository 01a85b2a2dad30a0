"""The lanes of several cards: whose they are, in the ring, in the attribution and in a trace."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from fluxtrain.events.trace.attribution import attribute
from fluxtrain.events.trace.export import trace_events
from fluxtrain.events.trace.lanes import Interval, StepLanes, merged_to_fit
from fluxtrain.events.trace.ring import RingWriter, read_ring


def step_of(*intervals: tuple[int, str, str, float, float]) -> StepLanes:
    """Intervals as card, lane, kind, start and stop, of a step of one second."""
    made = [
        Interval(lane, kind, "", start, stop - start, card=card)
        for card, lane, kind, start, stop in intervals
    ]
    return StepLanes(step=3, wall_s=0.0, length_s=1.0, intervals=made)


TWO = step_of(
    (0, "gpu", "forward", 0.0, 0.4),
    (1, "gpu", "forward", 0.1, 0.9),
    (0, "gpu", "backward", 0.6, 0.8),
    (1, "stall", "cards", 0.2, 0.3),
    (0, "h2d", "weights", 0.0, 0.1),
    (1, "h2d", "weights", 0.0, 0.3),
    (0, "cpu", "update", 0.0, 0.5),
)


def test_each_card_has_a_partition_and_waits_for_the_others_while_they_compute() -> None:
    found = attribute(TWO)
    first, second = found.cards
    assert first.busy_s == pytest.approx({"gpu": 0.6, "h2d": 0.1, "d2h": 0.0})
    assert first.waits_s == pytest.approx({"cards": 0.3, "host": 0.1})
    assert second.busy_s["gpu"] == pytest.approx(0.7)
    assert second.waits_s == pytest.approx({"cards": 0.2, "host": 0.1})  # 0.1 s of a stall
    assert (found.card, found.busy_s["gpu"]) == (1, second.busy_s["gpu"])
    assert found.busy_s["cpu"] == pytest.approx(0.5)
    assert found.because.startswith("card 1: computation 700 ms of 1.00 s")
    assert "card 0 idle beside others 300 ms (30%)" in found.told


def test_the_ring_keeps_the_card_of_each_interval_and_reads_older_files(tmp_path: Path) -> None:
    ring = RingWriter(tmp_path / "ring")
    ring.write(TWO)
    older = step_of((0, "gpu", "forward", 0.0, 0.4))  # the bytes that older writers made
    ring.write(replace(older, step=4))
    ring.close()
    both, one = read_ring(tmp_path / "ring")
    assert both.cards == 2 and one.cards == 1
    wanted = sorted((i.lane, i.card, i.kind) for i in TWO.intervals)
    assert sorted((i.lane, i.card, i.kind) for i in both.intervals) == wanted
    assert not any(i.began_before or i.goes_on for i in both.intervals)


def test_intervals_of_two_cards_are_never_merged_into_one() -> None:
    turns = [Interval("gpu", "forward", "", at / 10, 0.1, card=at % 2) for at in range(10)]
    kept, merged, _, dropped = merged_to_fit(turns, 2)
    assert (len(kept), merged, dropped) == (2, 8, 0)
    assert {one.card for one in kept} == {0, 1}
    assert [one.pieces for one in kept] == [5, 5]


def test_a_trace_has_the_lanes_of_each_card_together() -> None:
    events = list(trace_events([TWO], "demo"))
    names = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    order = [e["tid"] for e in events if e["name"] == "thread_sort_index"]
    titles = [names[tid] for tid in order]
    assert titles[1].startswith("card 0 gpu") and titles.index("card 1 gpu: computation") == 7
    assert titles[-3:] == ["cpu: optimizer", "disk", "host: the loop"]
    drawn = {names[e["tid"]] for e in events if e["ph"] == "X"}
    assert {"card 0 gpu: computation", "card 1 gpu: computation", "cpu: optimizer"} <= drawn
