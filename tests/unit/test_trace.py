"""Traces for Perfetto: valid in every case, true to the lanes."""

from __future__ import annotations

import gzip
import json
import os
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from fluxtrain.errors import BadInput
from fluxtrain.events.run_folder.run_dir import RunDir
from fluxtrain.events.trace.export import (
    recorded_steps,
    trace_events,
    traced,
    write_trace,
)
from fluxtrain.events.trace.lanes import Interval, StepLanes
from fluxtrain.events.trace.ring import RingWriter

STEPS = [
    StepLanes(
        step=step, wall_s=1e9 + step * 0.5, length_s=0.5,
        intervals=[
            Interval("gpu", "forward", 'layers."0"', 0.0, 0.2),
            Interval("cpu", "update", "layers.0", 0.1, 0.4, pieces=3),
            Interval("stall", "weights", "", 0.2, 0.05),
        ],
    )
    for step in (4, 5)
]  # fmt: skip


def run_with(path: Path, steps: list[StepLanes]) -> RunDir:
    path.mkdir()
    (path / "run.json").write_text("{}")
    ring = RingWriter(path / "timeline.ring")
    for step in steps:
        ring.write(step)
    ring.close()
    return RunDir(path)


def read(path: Path) -> list[dict[str, Any]]:
    raw = path.read_bytes()
    found = json.loads(gzip.decompress(raw) if path.suffix == ".gz" else raw)
    assert found["displayTimeUnit"] == "ms"
    return list(found["traceEvents"])


@pytest.mark.parametrize("name", ["trace.json", "trace.json.gz"])
def test_every_event_is_one_that_the_format_knows(tmp_path: Path, name: str) -> None:
    size = write_trace(tmp_path / name, STEPS, "demo")
    assert size == (tmp_path / name).stat().st_size
    for event in read(tmp_path / name):
        assert isinstance(event["pid"], int) and isinstance(event["tid"], int)
        assert isinstance(event["name"], str) and isinstance(event["args"], dict)
        assert event["ph"] in ("X", "M")
        if event["ph"] == "X":
            assert event["ts"] >= 0 and event["dur"] >= 0


def test_intervals_stand_in_microseconds_after_the_first_step() -> None:
    events = [e for e in trace_events(STEPS, "demo") if e["ph"] == "X"]
    steps = [e for e in events if e["cat"] == "step"]
    assert [(e["ts"], e["dur"], e["args"]["step"]) for e in steps] == [
        (0, 500_000, 4), (500_000, 500_000, 5),
    ]  # fmt: skip
    update = next(e for e in events if e["name"] == "update layers.0")
    assert (update["ts"], update["dur"], update["args"]["pieces"]) == (100_000, 400_000, 3)
    assert next(e["cat"] for e in events if e["name"] == "weights") == "stall"


@pytest.mark.parametrize("linked", [False, True])
def test_a_pipe_or_a_device_is_not_replaced_by_a_trace(tmp_path: Path, linked: bool) -> None:
    os.mkfifo(path := tmp_path / "pipe")
    if linked:
        (path := tmp_path / "link").symlink_to("pipe")
    with pytest.raises(BadInput, match="is a pipe or a device, and a trace is a file"):
        write_trace(path, STEPS, "demo")
    assert (tmp_path / "pipe").is_fifo() and path.is_fifo()


def test_a_full_disk_leaves_no_half_of_a_trace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("fluxtrain.events.trace.export.os.replace", full)
    with pytest.raises(OSError, match="free some space"):
        write_trace(tmp_path / "trace.json", STEPS, "demo")
    assert list(tmp_path.iterdir()) == []


def test_a_missing_run_one_without_a_ring_and_an_empty_ring_are_told_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLUXTRAIN_RUNS", str(tmp_path))
    with pytest.raises(BadInput, match="no run 'nope'"):
        recorded_steps("nope")
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "run.json").write_text("{}")
    with pytest.raises(BadInput, match="earlier version"):
        recorded_steps("old")
    run_with(tmp_path / "fresh", [])
    with pytest.raises(BadInput, match="no whole step"):
        recorded_steps("fresh")


def test_a_run_that_fails_leaves_its_trace_and_its_error(tmp_path: Path) -> None:
    run, said = run_with(tmp_path / "run", STEPS), []
    with pytest.raises(ZeroDivisionError), traced(run, tmp_path / "t.json", said.append):
        raise ZeroDivisionError
    assert len(read(tmp_path / "t.json")) > 8
    assert said and "2 steps" in said[0]
    with traced(run, tmp_path / "nowhere" / "t.json", said.append):
        pass
    assert said[1].startswith("error: no trace was written")
    with traced(run, None, said.append):
        pass
    assert len(said) == 2


def test_copies_that_cross_two_at_a_time_are_on_threads_of_their_own() -> None:
    spans = [(0.0, 0.2), (0.1, 0.2), (0.2, 0.3), (0.4, 0.05), (0.5, 0.5), (0.6, 0.1)]
    copies = [Interval("h2d", "weights", str(i), *span) for i, span in enumerate(spans)]
    copies += [Interval("d2h", "gradients", "", 0.0, 0.2)]
    later = [Interval("h2d", "weights", "", 0.0, 0.1, began_before=True)]
    steps = [
        StepLanes(step=1 + i, wall_s=1e9 + i, length_s=1.0, intervals=intervals)
        for i, intervals in enumerate((copies, later))
    ]
    events = [e for e in trace_events(steps, "demo") if e["ph"] == "X"]
    of_copies = [e for e in events if e["cat"] == "h2d"]
    assert len(of_copies) == len(spans) + 1
    threads: dict[int, list[tuple[float, float]]] = {}
    for event in of_copies:
        threads.setdefault(event["tid"], []).append((event["ts"], event["ts"] + event["dur"]))
    assert len(threads) == 2
    for mine in threads.values():
        assert all(a[1] <= b[0] + 0.01 for a, b in pairwise(mine))
