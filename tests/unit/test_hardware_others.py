"""What other programs used of the processors, and when a measurement beside them is made again."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from fluxtrain.measure.probe import others
from fluxtrain.measure.probe.others import (
    BUSY_SHARE,
    ProcessorUse,
    beside_text,
    is_calm_after,
    others_share,
    read_use,
)

STAT = "cpu  {user} 10 20 {idle} 5 1 2 3 7 7\ncpu0 1 1 1 1\n"


def tree(root: Path, user: int, idle: int) -> Path:
    (root / "proc").mkdir(parents=True)
    (root / "proc" / "stat").write_text(STAT.format(user=user, idle=idle))
    return root


def test_idle_time_waiting_for_disks_and_guests_are_not_counted_as_busy(tmp_path: Path) -> None:
    before = read_use(tree(tmp_path / "a", 100, 1000))
    after = read_use(tree(tmp_path / "b", 400, 9000))
    assert before is not None
    assert after is not None
    assert before.busy_s * os.sysconf("SC_CLK_TCK") == pytest.approx(100 + 10 + 20 + 1 + 2 + 3)
    assert after.busy_s - before.busy_s == pytest.approx(300 / os.sysconf("SC_CLK_TCK"))


@pytest.mark.parametrize("text", ["", "intr 1 2 3\n", "cpu a b\n", "cpu 1 2\n"])
def test_what_the_kernel_does_not_tell_is_not_known(tmp_path: Path, text: str) -> None:
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc" / "stat").write_text(text)
    assert read_use(tmp_path) is None
    assert read_use(tmp_path / "nothing") is None
    assert others_share(None) is None


def test_the_process_itself_is_not_another_program(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    before = ProcessorUse(busy_s=10.0, own_s=2.0, at_s=0.0)
    assert before.others_share(ProcessorUse(busy_s=18.0, own_s=6.0, at_s=2.0)) == pytest.approx(0.5)
    assert before.others_share(ProcessorUse(busy_s=11.0, own_s=6.0, at_s=2.0)) == 0.0
    assert before.others_share(before) is None


def test_what_was_measured_in_peace_is_believed_without_a_look(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def never() -> None:
        raise AssertionError("nobody has to look")

    monkeypatch.setattr(others, "read_use", never)
    assert not is_calm_after(None)
    assert not is_calm_after(BUSY_SHARE / 2)
    assert beside_text(BUSY_SHARE / 2, command="x") == beside_text(None, command="x") == ""


@pytest.mark.parametrize(("now", "again"), [(0.0, True), (0.5, False), (None, False)])
def test_what_was_measured_beside_others_is_measured_again_once_they_are_gone(
    monkeypatch: pytest.MonkeyPatch, now: float | None, again: bool
) -> None:
    monkeypatch.setattr(others, "LOOK_S", 0.0)
    monkeypatch.setattr(others, "others_share", lambda _: now)
    assert is_calm_after(0.6) is again
