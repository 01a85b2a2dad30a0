"""The trainer never waits for a reader, and the journal has no gap."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from fluxtrain.events.emitter import Emitter
from fluxtrain.events.events import Done, Heartbeat, LogWritten, StepFinished
from fluxtrain.events.journal import read_events
from fluxtrain.events.live import PENDING_FRAMES
from fluxtrain.events.reader import PipeReader

Make = Callable[..., Any]

READ_UNTIL_STOPPED = """
import os, sys, time
descriptor = int(sys.argv[1])
print("ready", flush=True)
while os.read(descriptor, 65536):
    pass
"""


class Clock:
    """A clock that the test sets."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def journal(tmp_path: Path) -> Path:
    return tmp_path / "events.ndjson"


@pytest.fixture
def pipe() -> Iterator[tuple[PipeReader, int]]:
    read_end, write_end = os.pipe()
    reader = PipeReader(read_end)
    yield reader, write_end  # the emitter of the test owns and closes the writing end
    reader.close()


def fill(descriptor: int) -> None:
    """Leave no room in a pipe."""
    os.set_blocking(descriptor, False)
    try:
        while True:
            os.write(descriptor, b"\n" * 4096)
    except BlockingIOError:
        return


def assert_no_gap(path: Path, count: int | None = None) -> None:
    numbers = [event.seq for event in read_events(path)]
    assert numbers == list(range(1, len(numbers) + 1))
    assert count is None or len(numbers) == count


def test_the_same_frames_reach_the_journal_and_the_pipe(
    journal: Path, pipe: tuple[PipeReader, int], make_step: Make, make_memory: Make
) -> None:
    reader, write_end = pipe
    emitter = Emitter(journal, write_end)
    for event in (make_step(1), make_memory(), make_step(2)):
        emitter.emit(event)
    emitter.close()
    events = list(read_events(journal))
    assert events == reader.poll()
    assert [event.seq for event in events] == [1, 2, 3]
    assert events[0].wall_s == pytest.approx(time.time(), abs=60)
    assert events[0].t_s <= events[2].t_s
    assert reader.closed


def test_the_journal_of_a_finished_run_ends_with_the_last_sample_of_every_gauge(
    journal: Path, make_memory: Make
) -> None:
    clock = Clock()
    emitter = Emitter(journal, clock=clock)
    for tenth in range(5):
        clock.now_s = 1000 + tenth / 10
        emitter.emit(make_memory(host_arena_bytes=tenth))
        emitter.emit(Heartbeat(phase="training", step=tenth))
    ending = Done(exit_code=0, step=4, seconds=0.4, loss=1.0, evaluation_loss=None, model_path=None)
    emitter.emit(ending)
    emitter.close()
    events: Any = read_events(journal)
    first_memory, first_beat, memory, beat, done = events
    assert (first_memory.host_arena_bytes, first_beat.step) == (0, 0)
    assert (memory.host_arena_bytes, beat.step) == (4, 4)
    assert memory.t_s == clock.now_s
    assert isinstance(done, Done)
    assert_no_gap(journal, count=5)


def test_a_reader_stopped_by_a_signal_costs_microseconds_and_no_journal_frame(
    journal: Path, make_step: Make, make_memory: Make
) -> None:
    read_end, write_end = os.pipe()
    reader = subprocess.Popen(
        [sys.executable, "-c", READ_UNTIL_STOPPED, str(read_end)],
        pass_fds=(read_end,),
        stdout=subprocess.PIPE,
    )
    os.close(read_end)
    try:
        assert reader.stdout is not None
        reader.stdout.readline()
        emitter = Emitter(journal, write_end)
        reader.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, reader.pid, os.WSTOPPED | os.WNOWAIT)
        costs_ns = []
        for step in range(6000):
            for event in (make_memory(), make_step(step)):
                start_ns = time.perf_counter_ns()
                emitter.emit(event)
                costs_ns.append(time.perf_counter_ns() - start_ns)
        costs_ns.sort()
        assert emitter.dropped > 5000  # it was really full
        assert costs_ns[len(costs_ns) // 2] < 100_000  # measured: 5 us; a busy machine is slower
        emitter.close()
    finally:
        reader.kill()
        reader.communicate()
    steps = [event.step for event in read_events(journal) if isinstance(event, StepFinished)]
    assert steps == list(range(6000))
    assert_no_gap(journal)


def test_lifecycle_events_wait_for_the_reader_in_order_up_to_a_bound(
    pipe: tuple[PipeReader, int], make_step: Make
) -> None:
    reader, write_end = pipe
    emitter = Emitter(None, write_end)
    fill(write_end)
    count = PENDING_FRAMES + 40
    for step in range(count):
        emitter.emit(make_step(step))
    assert emitter.dropped == 40
    assert reader.poll() == []  # the filling is gone, there is room again
    emitter.emit(Heartbeat(phase="training", step=0))
    events = reader.poll()
    steps = [event.step for event in events if isinstance(event, StepFinished)]
    assert steps == list(range(40, count))
    emitter.close()


def test_when_the_reader_dies_the_run_goes_on_and_the_loss_is_counted(
    journal: Path, pipe: tuple[PipeReader, int], make_step: Make
) -> None:
    reader, write_end = pipe
    emitter = Emitter(journal, write_end)
    emitter.emit(make_step(1))
    reader.close()
    for step in (2, 3):
        emitter.emit(make_step(step))
    assert emitter.dropped == 1  # later ones have no reader to be dropped for
    emitter.close()
    assert_no_gap(journal, count=3)


def test_frames_from_many_threads_are_whole_and_numbered_without_a_gap(
    journal: Path, make_step: Make
) -> None:
    emitter = Emitter(journal)
    threads = [
        threading.Thread(target=lambda n=n: [emitter.emit(make_step(n)) for _ in range(200)])
        for n in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    emitter.close()
    assert_no_gap(journal, count=1600)


def test_a_full_disk_raises_once_and_what_was_written_stays_readable(tmp_path: Path) -> None:
    # RLIMIT_FSIZE makes the kernel refuse growth, with a short write first, as a full disk does.
    program = f"""
import json, resource, threading
from pathlib import Path
from fluxtrain.errors import NoSpace
from fluxtrain.events.emitter import Emitter
from fluxtrain.events.events import Done, Heartbeat, LogWritten
resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, resource.RLIM_INFINITY))
emitter = Emitter(Path({str(tmp_path / "events.ndjson")!r}))
raised = []
for n in range(50):
    emitter.emit(Heartbeat(phase="training", step=n))
    try:
        emitter.emit(LogWritten(level="info", text="x" * 700))
    except NoSpace as error:
        raised.append((n, str(error), error.exit_code))
other = []
def from_another_thread() -> None:
    emitter.emit(LogWritten(level="info", text="y" * 700))
    other.append("quiet")
thread = threading.Thread(target=from_another_thread)
thread.start()
thread.join()
resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, resource.RLIM_INFINITY))
emitter.emit(Done(exit_code=5, step=1, seconds=1.0, loss=None, evaluation_loss=None,
                  model_path=None))
resource.setrlimit(resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))
try:
    emitter.emit(LogWritten(level="info", text="again"))
except NoSpace:
    raised.append("again")
emitter.close()
print(json.dumps([raised, other, emitter.journal_lost]))
"""
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        check=False,
        env=child_env(),
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    (first, again), other, lost = json.loads(done.stdout)
    assert again == "again"  # space came back and went again
    refused_at, message, exit_code = first
    assert exit_code == 5
    assert "events.ndjson" in message and "free" in message and "--run-dir" in message
    assert other == ["quiet"]
    events = list(read_events(tmp_path / "events.ndjson"))
    assert isinstance(events[-1], Done)
    assert_no_gap(tmp_path / "events.ndjson")
    logs = sum(isinstance(event, LogWritten) for event in events)
    assert logs == refused_at
    assert lost >= 50 - logs + 2


def child_env() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
