"""The ring of step timelines: what is written comes back, whatever happens to the file."""

from __future__ import annotations

import random
import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fluxtrain.events.trace.lanes import (
    LANES,
    Interval,
    StepLanes,
    head_of,
    merged_to_fit,
    packed,
    unpacked,
    whole,
)
from fluxtrain.events.trace.ring import SLOT_BYTES, SLOTS, RingReader, RingWriter, read_ring


def step_of(step: int, blocks: int = 4, **fields: object) -> StepLanes:
    intervals = [
        Interval("gpu", "forward", f"layers.{i}", i * 0.01, 0.008) for i in range(blocks)
    ] + [Interval("h2d", "weights", f"layers.{i}", i * 0.01, 0.004) for i in range(blocks)]
    values = {"wall_s": 1e9 + step, "length_s": 1.0, "intervals": intervals, **fields}
    return StepLanes(step=step, **values)  # type: ignore[arg-type]


def steps_in(path: Path) -> list[int]:
    return [one.step for one in read_ring(path)]


def written(path: Path, steps: range) -> Path:
    ring = RingWriter(path)
    for step in steps:
        ring.write(step_of(step))
    ring.close()
    return path


def test_a_step_comes_back_as_it_was_written_to_a_microsecond(tmp_path: Path) -> None:
    before = step_of(
        7,
        length_s=2.5,
        intervals=[
            Interval("gpu", "backward", "model.layers.3", 0.25, 0.125, began_before=True),
            Interval("cpu", "update", "größer", 1.0, 1.5, goes_on=True),
            Interval("stall", "weights", "", 2.0, 0.0),
        ],
        late=2,
        dropped=3,
    )
    ring = RingWriter(tmp_path / "ring")
    ring.write(before)
    (after,) = read_ring(tmp_path / "ring")
    assert (after.step, after.wall_s, after.length_s) == (7, before.wall_s, 2.5)
    assert (after.late, after.dropped, after.merged, after.process) == (2, 3, 0, 1)
    for old, new in zip(before.intervals, after.intervals, strict=True):
        assert (old.lane, old.kind, old.name, old.began_before, old.goes_on) == (
            new.lane, new.kind, new.name, new.began_before, new.goes_on,
        )  # fmt: skip
        assert new.start_s == pytest.approx(old.start_s, abs=2e-6)
        assert new.duration_s == pytest.approx(old.duration_s, abs=2e-6)


def test_the_ring_keeps_the_last_256_steps_and_stays_below_its_bound(tmp_path: Path) -> None:
    path = written(tmp_path / "ring", range(1, 301))
    assert steps_in(path) == list(range(45, 301))
    assert path.stat().st_size <= 4096 + SLOTS * SLOT_BYTES


def test_a_resumed_run_goes_on_in_the_same_ring_and_replaces_what_it_does_again(
    tmp_path: Path,
) -> None:
    path = written(tmp_path / "ring", range(1, 11))
    written(path, range(6, 9))
    found = read_ring(path)
    assert [one.step for one in found] == [*range(1, 6), 6, 7, 8]
    assert [one.process for one in found] == [1] * 5 + [2] * 3


def test_any_flipped_byte_of_a_record_is_noticed(tmp_path: Path) -> None:
    path = written(tmp_path / "ring", range(1, 4))
    raw = bytearray(path.read_bytes())
    record = whole(bytes(raw[4096 + SLOT_BYTES : 4096 + 2 * SLOT_BYTES]))
    assert record is not None
    for at in random.Random(0).sample(range(len(record)), 40):
        broken = raw.copy()
        broken[4096 + SLOT_BYTES + at] ^= 0x10
        path.write_bytes(broken)
        assert steps_in(path) == [1, 3], at


@pytest.mark.parametrize("content", [b"", b"FLUX", b"x" * 9000, b"FLUXRING" + b"\xff" * 9000])
def test_a_foreign_file_has_no_steps_and_is_replaced(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "ring"
    path.write_bytes(content)
    reader = RingReader(path)
    reader.poll()
    assert not reader.exists and reader.steps == ()
    assert steps_in(written(path, range(1, 3))) == [1, 2]


def test_a_reader_follows_and_says_when_there_is_news(tmp_path: Path) -> None:
    path = tmp_path / "ring"
    reader = RingReader(path)
    assert not reader.poll() and not reader.exists
    ring = RingWriter(path)
    ring.write(step_of(1))
    assert reader.poll() and [one.head.step for one in reader.steps] == [1]
    assert not reader.poll()
    for step in range(2, 400):
        ring.write(step_of(step))
    assert reader.poll()
    assert [one.head.step for one in reader.steps] == list(range(144, 400))
    path.unlink()
    assert reader.poll() and reader.steps == ()


def test_a_reader_beside_the_writer_sees_only_whole_steps(tmp_path: Path) -> None:
    path = tmp_path / "ring"
    ring = RingWriter(path)
    over = threading.Event()

    def write() -> None:
        for step in range(1, 1500):
            ring.write(step_of(step, blocks=step % 40))
        over.set()

    writer = threading.Thread(target=write)
    writer.start()
    reader, seen = RingReader(path), 0
    while not over.is_set():
        reader.poll()
        for one in reader.steps:
            lanes = unpacked(one.record)
            assert len(lanes.intervals) == 2 * (lanes.step % 40)
            assert lanes.wall_s == 1e9 + lanes.step
        steps = [one.head.step for one in reader.steps]
        assert steps == sorted(set(steps)) and len(steps) <= SLOTS
        seen = max(seen, steps[-1] if steps else 0)
    writer.join()
    reader.poll()
    assert reader.steps[-1].head.step == 1499


INTERVALS = st.lists(
    st.builds(
        Interval,
        st.sampled_from(LANES),
        st.sampled_from(["forward", "backward"]),
        st.sampled_from(["a", "b", ""]),
        st.floats(0, 10),
        st.floats(0, 1),
        st.just(1),
    ),
    max_size=60,
)


@given(INTERVALS, st.integers(1, 70))
def test_intervals_that_do_not_fit_are_merged_and_counted(
    intervals: list[Interval], limit: int
) -> None:
    kept, merged, hidden_s, dropped = merged_to_fit(intervals, limit)
    assert len(kept) <= limit
    assert len(kept) + merged + dropped == len(intervals)
    assert hidden_s >= 0
    if not dropped:
        assert sum(one.pieces for one in kept) == len(intervals)
        for lane in LANES:
            old = [one for one in intervals if one.lane == lane]
            new = [one for one in kept if one.lane == lane]
            if old:
                assert min(o.start_s for o in old) == min(n.start_s for n in new)
                assert max(o.stop_s for o in old) == pytest.approx(max(n.stop_s for n in new))
    if len(intervals) <= limit:
        assert (merged, hidden_s, dropped) == (0, 0.0, 0)


def test_a_lane_of_a_later_version_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    record = packed(step_of(1), 0, SLOT_BYTES)
    monkeypatch.setattr("fluxtrain.events.trace.lanes.LANES", ("gpu",))
    assert {one.lane for one in unpacked(record).intervals} == {"gpu"}
    assert head_of(record).intervals == 8
