"""Host memory near its end: caches first, then the run, and never for a moment's peak."""

from __future__ import annotations

from pathlib import Path

import pytest

from fluxtrain.machine.machine import memory_left
from fluxtrain.train.observe import host_room
from fluxtrain.train.observe.host_room import HostRoom
from fluxtrain.units import GIB, MIB

TOTAL = 24 * GIB


class Watched:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.left, self.now_s, self.given_up = TOTAL, 0.0, 0
        self.warned: list[str] = []
        self.ended: list[str] = []
        self.freed = 0
        self.asked: list[int] = []
        self.moves = False
        monkeypatch.setattr(host_room, "give_up_caches", self.give_up)
        self.room = HostRoom(
            self.warned.append, self.ended.append, self.move,
            read=lambda: (TOTAL, self.left), clock=lambda: self.now_s,
        )  # fmt: skip

    def move(self, size_bytes: int) -> bool:
        self.asked.append(size_bytes)
        return self.moves

    def give_up(self) -> None:
        self.given_up += 1
        self.left += self.freed

    def looks(self, *lefts: int) -> None:
        for left in lefts:
            self.left = left
            self.now_s += 1.0
            self.room.look()


def test_caches_are_given_up_once_and_again_after_a_recovery(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    watched = Watched(monkeypatch)
    watched.freed = 100 * MIB
    watched.looks(*[300 * MIB] * 5)
    assert watched.given_up == 1
    assert watched.warned == [
        "little host memory is left: 300 MiB of 24.0 GiB, and 400 MiB once caches were given up; "
        "close other programs"
    ]
    watched.looks(GIB, 300 * MIB)
    assert watched.given_up == 2 and not watched.ended


def test_the_run_ends_once_when_nothing_helped(monkeypatch: pytest.MonkeyPatch) -> None:
    watched = Watched(monkeypatch)
    watched.looks(50 * MIB, 50 * MIB)
    assert not watched.ended
    watched.looks(50 * MIB, 40 * MIB, 30 * MIB)
    assert len(watched.ended) == 1
    assert watched.ended[0].startswith("host memory ran out: 50.0 MiB of 24.0 GiB were left")


def test_a_moments_peak_ends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    watched = Watched(monkeypatch)
    for _ in range(10):
        watched.looks(50 * MIB, 50 * MIB, 200 * MIB)
    assert not watched.ended


def test_a_control_groups_limit_counts(tmp_path: Path) -> None:
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/meminfo").write_text("MemTotal: 8388608 kB\nMemAvailable: 4194304 kB\n")
    assert memory_left(tmp_path) == (8 * GIB, 4 * GIB)
    group = tmp_path / "sys/fs/cgroup"
    group.mkdir(parents=True)
    (group / "cgroup.controllers").write_text("memory")
    (tmp_path / "proc/self/cgroup").write_text("0::/\n")
    (group / "memory.max").write_text(str(2 * GIB))
    (group / "memory.current").write_text(str(2 * GIB - 10 * MIB))
    (group / "memory.stat").write_text(f"inactive_file {4 * MIB}\n")
    assert memory_left(tmp_path) == (2 * GIB, 14 * MIB)
    (tmp_path / "proc/meminfo").write_text("")
    (group / "memory.max").write_text("max")
    assert memory_left(tmp_path) is None


def test_states_leave_before_the_run_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    watched = Watched(monkeypatch)
    watched.moves = True
    watched.looks(*[50 * MIB] * 5)
    little = int(0.02 * TOTAL)
    assert watched.asked == [2 * little - 50 * MIB] * 5 and not watched.ended
    watched.moves = False  # nothing more can leave
    watched.looks(*[50 * MIB] * 3)
    assert len(watched.ended) == 1
