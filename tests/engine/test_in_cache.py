"""The benchmark of what arithmetic allows: processes that start together, in their own memory."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "bench"))
import in_cache


def test_every_process_gives_a_plausible_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(in_cache, "FIRST_S", 8.0)  # other tests run beside it
    found = in_cache.rates(2, seconds=0.1)
    assert set(found) == set(in_cache.KINDS)
    assert all(1e6 < per_s < 1e12 for per_s in found.values())


def test_a_process_that_comes_too_late_says_so() -> None:
    with pytest.raises(SystemExit, match="s too late: the machine is busy"):
        in_cache.measured(time.time() - 1.0, 0.1)


def test_processes_that_are_not_done_in_time_are_told_of_and_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    started: list[subprocess.Popen[bytes]] = []
    start = subprocess.Popen

    def noted(*arguments: object, **options: object) -> subprocess.Popen[bytes]:
        started.append(start(*arguments, **options))  # type: ignore[call-overload]
        return started[-1]

    monkeypatch.setattr(subprocess, "Popen", noted)
    monkeypatch.setattr(in_cache, "SLACK_S", -1.5)
    with pytest.raises(RuntimeError, match="not done"):
        in_cache.rates(1, seconds=0.1)
    assert started[0].poll() is not None


def test_the_time_that_is_measured_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(in_cache, "SLACK_S", 1.5)
    assert in_cache.rates(1, seconds=1.0)["8bit"] > 1e6
