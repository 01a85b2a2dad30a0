"""A journal survives kills and resumes, and every reader sees the same."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fluxtrain.errors import BadInput
from fluxtrain.events.emitter import Emitter
from fluxtrain.events.events import Heartbeat, StepFinished
from fluxtrain.events.frames import SchemaTooNew, Skipped, encode_frame
from fluxtrain.events.journal import JournalWriter, read_end, read_events, tail_lines
from fluxtrain.events.reader import JournalFollower, PipeReader

Make = Callable[..., Any]


@pytest.fixture
def journal(tmp_path: Path) -> Path:
    return tmp_path / "events.ndjson"


def write_run(path: Path, make_step: Make, steps: Iterable[int]) -> None:
    emitter = Emitter(path)
    for step in steps:
        emitter.emit(make_step(step))
    emitter.close()


def steps_of(events: Iterable[object]) -> list[int]:
    return [event.step for event in events if isinstance(event, StepFinished)]


def test_a_resumed_run_goes_on_with_the_numbers(journal: Path, make_step: Make) -> None:
    write_run(journal, make_step, range(5))
    write_run(journal, make_step, range(5, 9))
    events = list(read_events(journal))
    assert [event.seq for event in events] == list(range(1, 10))
    assert steps_of(events) == list(range(9))


@pytest.mark.parametrize("cut", [1, 7, 200])
def test_a_torn_last_line_is_the_end_and_the_next_writer_removes_it(
    journal: Path, make_step: Make, cut: int
) -> None:
    write_run(journal, make_step, range(3))
    whole = journal.read_bytes()
    journal.write_bytes(whole[:-cut])
    assert steps_of(read_events(journal)) == [0, 1]
    write_run(journal, make_step, [7])
    events = list(read_events(journal))
    assert steps_of(events) == [0, 1, 7]
    assert [event.seq for event in events] == [1, 2, 3]
    assert journal.read_bytes().startswith(whole[: whole.rindex(b"\n", 0, -1) + 1])


def test_a_journal_with_a_hole_as_large_as_a_disk_is_refused_at_once_and_stays(
    journal: Path,
) -> None:
    journal.write_bytes(b"{}\n")
    os.truncate(journal, 1 << 42)
    with pytest.raises(BadInput, match="has no line in its last 256 MiB, so no run wrote it"):
        JournalWriter(journal)
    assert journal.stat().st_size == 1 << 42


def test_garbage_in_the_middle_is_skipped_and_counted(journal: Path, make_step: Make) -> None:
    frame = encode_frame(make_step(1))
    unknown = b'{"event":"rebalanced","seq":3}\n'
    journal.write_bytes(frame + b"\x00\xff garbage\n" + unknown + b"x" * 10_000 + b"\n" + frame)
    skipped: list[Skipped] = []
    assert steps_of(read_events(journal, skipped)) == [1, 1]
    assert skipped == [Skipped.GARBAGE, Skipped.UNKNOWN, Skipped.GARBAGE]
    follower = JournalFollower(journal)
    assert steps_of(follower.read_all()) == [1, 1]
    assert follower.garbage_lines == 2


def test_all_readers_refuse_another_major_version(journal: Path, make_hello: Make) -> None:
    tree = msgspec.to_builtins(make_hello()) | {"schema": "2.0"}
    line = msgspec.json.encode(tree) + b"\n"
    journal.write_bytes(line)
    read_end, write_end = os.pipe()
    os.write(write_end, line)
    os.close(write_end)
    reader = PipeReader(read_end)
    for read in (
        JournalFollower(journal).poll,
        reader.poll,
        lambda: list(read_events(journal)),
        lambda: Emitter(journal),  # nor does a writer append to what it cannot read
    ):
        with pytest.raises(SchemaTooNew):
            read()
    reader.close()


def test_a_follower_sees_a_run_from_before_its_first_byte(journal: Path, make_step: Make) -> None:
    follower = JournalFollower(journal)
    assert follower.poll() == []
    emitter = Emitter(journal)
    assert follower.poll() == []
    for step in range(3):
        emitter.emit(make_step(step))
        assert steps_of(follower.poll()) == [step]
        assert follower.poll() == []
    emitter.close()


def test_a_follower_starts_again_when_the_file_is_cut_or_replaced(
    journal: Path, make_step: Make
) -> None:
    write_run(journal, make_step, range(3))
    follower = JournalFollower(journal)
    assert steps_of(follower.poll()) == [0, 1, 2]
    os.truncate(journal, 0)
    assert follower.poll() == []
    write_run(journal, make_step, [5])
    assert steps_of(follower.poll()) == [5]
    assert follower.restarts == 1
    other = journal.with_suffix(".new")
    write_run(other, make_step, range(8, 16))
    other.replace(journal)
    assert steps_of(follower.poll()) == list(range(8, 16))
    assert follower.restarts == 2


def test_one_poll_is_bounded_and_polling_on_gives_everything(
    journal: Path, make_step: Make
) -> None:
    write_run(journal, make_step, range(400))
    follower = JournalFollower(journal, poll_bytes=16_384)
    first = follower.poll()
    assert 0 < len(first) < 100
    assert steps_of(first + follower.read_all()) == list(range(400))


@given(sizes=st.lists(st.integers(1, 900), max_size=40), garbage=st.binary(max_size=30))
def test_however_the_bytes_arrive_a_pipe_reader_gives_the_same_events(
    sizes: list[int], garbage: bytes
) -> None:
    beats = [Heartbeat(phase="training", step=step) for step in range(12)]
    frames = [encode_frame(beat) for beat in beats]
    stream = b"".join(frames[:6]) + garbage.replace(b"\n", b"") + b"\n" + b"".join(frames[6:])
    read_end, write_end = os.pipe()
    reader = PipeReader(read_end)
    events = []
    for size in [*sizes, len(stream)]:
        os.write(write_end, stream[:size])
        stream = stream[size:]
        events += reader.poll()
    os.close(write_end)
    assert events + reader.poll() == beats
    assert reader.closed
    assert reader.garbage_lines == 1


def test_a_pipe_of_endless_garbage_uses_bounded_memory() -> None:
    read_end, write_end = os.pipe()
    reader = PipeReader(read_end)
    for _ in range(100):
        os.write(write_end, b"x" * 30_000)
        assert reader.poll() == []
        assert len(reader._rest) <= 4096
    os.write(write_end, b"\n" + encode_frame(Heartbeat(phase="training", step=1)))
    assert len(reader.poll()) == 1
    assert reader.garbage_lines == 1
    os.close(write_end)
    reader.close()


def test_the_newest_event_is_found_from_the_end(journal: Path, make_step: Make) -> None:
    assert read_end(journal).last is None
    write_run(journal, make_step, range(2000))
    with open(journal, "ab") as file:
        file.write(b"garbage\n" + b'{"torn')
    end = read_end(journal)
    assert end.step is not None and end.last == end.step and end.step.step == 1999
    assert tail_lines(journal, 1000)[0] == b"garbage"


def test_a_link_in_the_place_of_the_journal_is_refused_and_its_target_left_alone(
    tmp_path: Path,
) -> None:
    """The torn tail of a journal is cut off: of somebody else's file nothing must be."""
    other = tmp_path / "letter.txt"
    other.write_text("dear all,\nno newline at the end")
    (tmp_path / "events.ndjson").symlink_to(other)
    with pytest.raises(BadInput, match="symbolic links"):
        JournalWriter(tmp_path / "events.ndjson")
    assert other.read_text() == "dear all,\nno newline at the end"
