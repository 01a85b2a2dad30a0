"""The benchmark of what arithmetic allows: processes that start together, in their own memory."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "bench"))
import in_cache

BUSY_S = 120.0  # other tests run beside these


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[subprocess.Popen[bytes]]:
    """The processes that a test starts."""
    found: list[subprocess.Popen[bytes]] = []
    start = subprocess.Popen

    def noted(*arguments: object, **options: object) -> subprocess.Popen[bytes]:
        found.append(start(*arguments, **options))  # type: ignore[call-overload]
        return found[-1]

    monkeypatch.setattr(subprocess, "Popen", noted)
    return found


def test_every_process_gives_a_plausible_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(in_cache, "SLACK_S", BUSY_S)
    found = in_cache.rates(2, seconds=0.1)
    assert set(found) == set(in_cache.KINDS)
    assert all(1e6 < per_s < 1e12 for per_s in found.values())


def test_a_process_that_ends_says_why(
    monkeypatch: pytest.MonkeyPatch, started: list[subprocess.Popen[bytes]]
) -> None:
    monkeypatch.setattr(in_cache, "SLACK_S", BUSY_S)
    monkeypatch.setattr(in_cache, "__file__", "no_such_file.py")
    with pytest.raises(RuntimeError, match=r"no_such_file\.py"):
        in_cache.rates(2, seconds=0.1)
    assert len(started) == 2 and all(process.poll() is not None for process in started)


def test_processes_that_are_not_done_in_time_are_told_of_and_ended(
    monkeypatch: pytest.MonkeyPatch, started: list[subprocess.Popen[bytes]]
) -> None:
    monkeypatch.setattr(in_cache, "SLACK_S", -0.5)
    with pytest.raises(RuntimeError, match="not done in time"):
        in_cache.rates(2, seconds=0.1)
    assert len(started) == 2 and all(process.poll() is not None for process in started)
