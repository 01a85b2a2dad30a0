"""The scratch file of records: what an update reads is what the update before it wrote."""

from __future__ import annotations

import errno
import os
import random
import tempfile
import threading
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from torch import Tensor

from fluxtrain.core.device import spill
from fluxtrain.core.device.disk import PAGE_BYTES
from fluxtrain.core.device.recorder import HostClock, Note, Recorder
from fluxtrain.core.device.spill import Awaited, Spill

BLOCK_BYTES = 2 * PAGE_BYTES
RECORD_BYTES = 5 * PAGE_BYTES
RECORDS = 7  # more than there are buffers


def zeros() -> Tensor:
    return torch.zeros(RECORD_BYTES, dtype=torch.uint8)


class SlowFile:
    """Reads and writes of a file that take a while, at random, and show what overlaps."""

    def __init__(self) -> None:
        self.random, self.lock = random.Random(3), threading.Lock()
        self.reading: dict[int, tuple[int, int]] = {}  # id: address, position in the file
        self.writing: dict[int, tuple[int, int]] = {}
        self.overlaps: list[str] = []

    def read(self, real: Any, file: int, into: list[Any], at: int) -> int:
        with self._under_way(self.reading, into[0], at):
            return int(real(file, into, at))

    def write(self, real: Any, file: int, source: list[Any], at: int) -> int:
        before = bytes(source[0])
        with self._under_way(self.writing, source[0], at):
            done = int(real(file, source, at))
        if bytes(source[0]) != before:
            self.overlaps.append(f"what was written to {at} changed meanwhile")
        return done

    def _under_way(self, mine: dict[int, tuple[int, int]], memory: Any, at: int) -> Any:
        return _UnderWay(self, mine, torch.frombuffer(memory, dtype=torch.uint8).data_ptr(), at)


class _UnderWay:
    def __init__(
        self, file: SlowFile, mine: dict[int, tuple[int, int]], address: int, at: int
    ) -> None:
        self.file, self.mine, self.address, self.at = file, mine, address, at

    def __enter__(self) -> None:
        with self.file.lock:
            others = [*self.file.writing.values()]
            others += self.file.reading.values() if self.mine is self.file.writing else ()
            for address, at in others:
                if address == self.address or at == self.at:
                    self.file.overlaps.append(f"two at once at {at} and {self.at}")
            self.mine[id(self)] = self.address, self.at
            pause_s = self.file.random.choice((0.0, 0.0, 0.0005, 0.002))
        time.sleep(pause_s)

    def __exit__(self, *_: object) -> None:
        with self.file.lock:
            del self.mine[id(self)]


class Updates(RuleBasedStateMachine):
    """Records are expected, then taken or dropped in that order, and read and written by others
    when none is queued, as the engine does it; a model in memory says what each must hold."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.TemporaryDirectory()
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(spill, "RECORD_BYTES", RECORD_BYTES)
        self.patch.setattr(spill, "BLOCK_BYTES", BLOCK_BYTES)
        self.file = SlowFile()
        for name, way in (("preadv", self.file.read), ("pwritev", self.file.write)):
            real = getattr(os, name)
            self.patch.setattr(os, name, lambda *args, real=real, way=way: way(real, *args))
        self.spill = Spill(Path(self.folder.name))
        self.records = [self.spill.record(RECORD_BYTES) for _ in range(RECORDS)]
        self.held = {
            record: torch.zeros(RECORD_BYTES, dtype=torch.uint8) for record in self.records
        }
        self.queue: list[Awaited] = []
        self.count = 0

    def _content(self) -> Tensor:
        self.count += 1
        drawn = torch.Generator().manual_seed(self.count)
        return torch.randint(0, 256, (RECORD_BYTES,), generator=drawn, dtype=torch.uint8)

    @rule(numbers=st.lists(st.integers(0, RECORDS - 1), min_size=1, max_size=6))
    def expect(self, numbers: list[int]) -> None:
        self.queue += [self.spill.expect(self.records[number]) for number in numbers]

    @precondition(lambda self: self.queue)
    @rule()
    def update(self) -> None:
        awaited = self.queue.pop(0)
        with self.spill.take(awaited) as buffer:
            assert torch.equal(buffer, self.held[awaited.record])
            content = self._content()
            buffer.copy_(content)
            self.held[awaited.record] = content

    @precondition(lambda self: self.queue)
    @rule()
    def skip(self) -> None:
        self.spill.drop(self.queue.pop(0))

    @precondition(lambda self: not self.queue)
    @rule(
        number=st.integers(0, RECORDS - 1),
        ends=st.tuples(st.integers(0, RECORD_BYTES - 1), st.integers(1, RECORD_BYTES)),
    )
    def read_and_write_a_part(self, number: int, ends: tuple[int, int]) -> None:
        start, size = ends[0], min(ends[1], RECORD_BYTES - ends[0])
        record = self.records[number]
        found = torch.empty(size, dtype=torch.uint8)
        self.spill.read(record, start, found)
        assert torch.equal(found, self.held[record][start : start + size])
        part = self._content()[:size]
        self.spill.write(record, start, part)
        self.held[record][start : start + size] = part

    @precondition(lambda self: not self.queue)
    @rule(number=st.integers(0, RECORDS - 1))
    def move_away_and_back(self, number: int) -> None:
        old = self.records[number]
        self.spill.give_back([old])
        del self.held[old]
        self.records[number] = fresh = self.spill.record(RECORD_BYTES)
        self.held[fresh] = zeros()
        assert self.spill._room_bytes == RECORDS * RECORD_BYTES

    @invariant()
    def nothing_was_used_by_two_at_once(self) -> None:
        assert not self.file.overlaps

    def teardown(self) -> None:
        for awaited in self.queue:
            self.spill.drop(awaited)
        for record in self.records:
            found = torch.empty(RECORD_BYTES, dtype=torch.uint8)
            self.spill.read(record, 0, found)
            assert torch.equal(found, self.held[record])
        self.spill.close()
        assert not self.file.overlaps
        self.patch.undo()
        assert not list(Path(self.folder.name).iterdir())
        self.folder.cleanup()


Updates.TestCase.settings = settings(
    max_examples=25, stateful_step_count=30, deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)  # fmt: skip
TestUpdates = Updates.TestCase


def test_a_file_that_nobody_used_ends_at_once(tmp_path: Path) -> None:
    made = Spill(tmp_path)
    made.close()
    made = Spill(tmp_path)
    awaited = made.expect(made.record(PAGE_BYTES))
    made.drop(awaited)
    made.close()


def test_what_the_disk_does_is_in_its_lane(tmp_path: Path) -> None:
    recorder = Recorder(HostClock())
    made = Spill(tmp_path, recorder)
    record = made.record(RECORD_BYTES)
    made.write(record, 0, torch.ones(RECORD_BYTES, dtype=torch.uint8))
    recorder.begin_step(1)
    with made.take(made.expect(record)):
        pass
    made.close()
    notes = [note for note in recorder.notes if isinstance(note, Note)]
    assert {(note.lane, note.kind) for note in notes} == {("disk", "spilled")}
    spans = [(note.start, note.stop) for note in notes]
    assert all(start < stop for start, stop in spans)
    assert all(stop <= start for (_, stop), (start, _) in pairwise(spans))  # one at a time


def test_room_is_lent_again_once_nothing_writes_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the newest update was dropped while the one before was still being written."""
    made, real, goes_on = Spill(tmp_path), os.pwritev, threading.Event()
    record = made.record(RECORD_BYTES)

    def slow(*args: Any) -> int:
        assert goes_on.wait(10)
        return real(*args)

    monkeypatch.setattr(os, "pwritev", slow)
    with made.take(made.expect(record)) as buffer:
        buffer.fill_(1)
    made.drop(made.expect(record))
    timer = threading.Timer(0.2, goes_on.set)
    timer.start()
    made.give_back([record])
    assert goes_on.is_set()
    timer.join()
    made.close()


def test_a_record_is_of_whole_pages(tmp_path: Path) -> None:
    made = Spill(tmp_path)
    first, second = made.record(5), made.record(PAGE_BYTES + 1)
    assert first.size_bytes == PAGE_BYTES
    assert (second.start, second.size_bytes) == (PAGE_BYTES, 2 * PAGE_BYTES)
    made.close()


@pytest.mark.parametrize("direct", [True, False])
def test_file_systems_without_direct_io_or_unnamed_files_are_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, direct: bool
) -> None:
    real = os.open

    def named_only(path: Any, flags: int, *rest: Any, **more: Any) -> int:
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(errno.EOPNOTSUPP, "Operation not supported")
        return real(path, flags, *rest, **more)

    monkeypatch.setattr(os, "open", named_only)
    monkeypatch.setattr(spill, "set_direct", lambda *_, **__: direct)
    made = Spill(tmp_path)
    record = made.record(RECORD_BYTES)
    made.write(record, 100, torch.arange(200, dtype=torch.uint8))
    found = torch.empty(302, dtype=torch.uint8)
    made.read(record, 99, found)
    assert found.tolist() == [0, *range(200), *[0] * 101]
    assert not list(tmp_path.iterdir())
    made.close()
