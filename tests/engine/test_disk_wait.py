"""A full disk is waited for: the run goes on when there is room, and ends with 5 when not."""

from __future__ import annotations

import errno
import os
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from fluxtrain.errors import NoSpace, ScratchLost
from fluxtrain.events import events as ev
from fluxtrain.events.emitter import Announcer, Emitter
from fluxtrain.events.journal import JournalWriter, read_events
from fluxtrain.train.checkpoint.checkpoint import list_checkpoints, read_checkpoint
from fluxtrain.train.observe.disk_wait import DiskWait
from tests.engine import runs
from tests.engine.test_resume import (
    assert_same_run,
    finished,
    running,
    steps_done,
    wait_for,
)

FULL = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


class Clock:
    """A clock that sleeping moves."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds


class Disk:
    """Refuses until `frees_s` on the clock."""

    def __init__(self, clock: Clock, frees_s: float, error: OSError = FULL) -> None:
        self.clock, self.frees_s, self.error, self.tries = clock, frees_s, error, 0

    def write(self) -> str:
        self.tries += 1
        if self.clock.now_s < self.frees_s:
            raise NoSpace("the disk is full") from self.error
        return "written"


def waiting(
    limit_s: float, stopping: Callable[[], bool] = lambda: False
) -> tuple[DiskWait, Clock, list[Any]]:
    told: list[Any] = []
    emitter: Any = type("Kept", (), {"emit": staticmethod(lambda event: None)})
    clock = Clock()
    announcer = Announcer(emitter, told.append)
    announcer.phase("training")
    return DiskWait(limit_s, announcer, stopping, clock=clock, sleep=clock.sleep), clock, told


def test_after_its_time_the_last_refusal_is_raised_with_code_5() -> None:
    wait, clock, _ = waiting(600.0)
    disk = Disk(clock, 10_000.0)
    with pytest.raises(NoSpace, match="the disk is full; waited 10m") as raised:
        wait.until_written(disk.write)
    assert raised.value.exit_code == 5 and clock.now_s == 600.0
    assert disk.tries < 60, "a checkpoint is not written anew every second"


def test_lost_optimizer_states_are_not_waited_for() -> None:
    wait, clock, _ = waiting(600.0)

    def write() -> None:
        raise ScratchLost("optimizer states cannot be written") from FULL

    with pytest.raises(ScratchLost, match="cannot be written$") as raised:
        wait.until_written(write)
    assert raised.value.exit_code == 5 and clock.now_s == 0.0


def test_an_event_that_the_journal_refused_is_in_it_once_after_the_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    emitter = Emitter(tmp_path / "events.ndjson")
    announcer, clock = Announcer(emitter, lambda _: None), Clock()
    DiskWait(60.0, announcer, lambda: False, clock=clock, sleep=clock.sleep)
    real = JournalWriter.append

    def append(self: JournalWriter, frame: bytes) -> None:
        if 0.0 < clock.now_s + 1e-9 < 5.0:
            raise NoSpace("full") from FULL
        real(self, frame)

    announcer.warn("before")
    monkeypatch.setattr(JournalWriter, "append", append)
    announcer.warn("refused")
    announcer.warn("after")
    emitter.close()
    told = list(read_events(tmp_path / "events.ndjson"))
    assert [e.text for e in told if isinstance(e, ev.LogWritten)] == ["before", "refused", "after"]
    assert [e.seq for e in told] == list(range(1, len(told) + 1)), "no gap"


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 24 MiB, with real ENOSPC; skips where none can be mounted."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=24m", "tmpfs", str(folder)]
    if subprocess.run(mount, check=False, capture_output=True).returncode:
        pytest.skip("no file system can be mounted here")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def fill_once_it_trains(run_dir: Path, leave: int) -> Path:
    """Take all room but `leave` bytes when the first checkpoint is there."""
    wait_for(lambda: bool(list_checkpoints(run_dir / "checkpoints")))
    disk = run_dir.parent
    filler = disk / "filler"
    with suppress(OSError):  # the run wrote meanwhile
        filler.write_bytes(b"x" * max(0, room(disk) - leave))
    if (lacks := leave - room(disk)) > 0:
        os.truncate(filler, max(0, filler.stat().st_size - lacks))
    return filler


def room(disk: Path) -> int:
    return os.statvfs(disk).f_bavail * os.statvfs(disk).f_frsize


def waits_for_room(run_dir: Path) -> bool:
    """Whether the journal says so, or is full itself: nothing came for a second."""
    before = (run_dir / "events.ndjson").stat().st_size
    if any(event.phase == "no space" for event in runs.told(run_dir, ev.PhaseChanged)):
        return True
    time.sleep(1.0)
    return (run_dir / "events.ndjson").stat().st_size == before


@pytest.mark.thinned(1)
@pytest.mark.parametrize("leave", [150_000, 0], ids=["checkpoint", "journal"])
def test_a_run_on_a_disk_that_fills_up_goes_on_bit_for_bit_once_there_is_room(
    run_config: Callable[..., Path], tmp_path: Path, small_disk: Path, leave: int
) -> None:
    config = run_config(train__steps=80, train__checkpoint_every=8, train__evaluate_every="end")
    assert finished("train", config, "--run-dir", tmp_path / "whole") == 0
    run_dir = small_disk / "run"
    with running("train", config, "--run-dir", run_dir) as process:
        filler = fill_once_it_trains(run_dir, leave)
        wait_for(lambda: waits_for_room(run_dir) or not process.is_alive())
        assert process.is_alive()
        assert [read_checkpoint(path) for path in list_checkpoints(run_dir / "checkpoints")]
        filler.unlink()
        process.join(120)
        assert process.exitcode == 0
    assert_same_run(tmp_path / "whole", run_dir)
    assert sorted(step.step for step in runs.told(run_dir, ev.StepFinished)) == list(range(1, 81))


@pytest.mark.slow
def test_a_disk_that_stays_full_ends_the_run_with_5_and_its_last_checkpoint(
    run_config: Callable[..., Path], small_disk: Path
) -> None:
    config = run_config(train__steps=80, train__checkpoint_every=8, train__evaluate_every="end")
    run_dir = small_disk / "run"
    wait = ["--disk-wait", "0.02"]  # 1.2 s
    with running("train", config, "--run-dir", run_dir, *wait) as process:
        filler = fill_once_it_trains(run_dir, 150_000)
        process.join(120)
        assert process.exitcode == 5
    assert [read_checkpoint(path) for path in list_checkpoints(run_dir / "checkpoints")]
    assert not list((run_dir / "checkpoints").glob(".writing-*"))
    told = runs.told(run_dir, ev.Failed)[-1].message
    assert "waited" in told and "the last good checkpoint is" in told
    filler.unlink()
    assert finished("train", config, "--run-dir", run_dir, "--resume", "auto") == 0
    assert steps_done(run_dir) >= 80
