"""The benchmark of what arithmetic allows: processes that start together, in their own memory."""

from __future__ import annotations

import os
import subprocess
import sys
import time
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
    assert all(1e6 < rate.per_s < 1e12 and 1e6 < rate.clock < 1e11 for rate in found.values())


def test_processes_that_wait_measure_as_often_as_they_are_asked(
    monkeypatch: pytest.MonkeyPatch, started: list[subprocess.Popen[bytes]]
) -> None:
    monkeypatch.setattr(in_cache, "SLACK_S", BUSY_S)
    with in_cache.waiting(2, 0.02, "scalar") as measure:
        rounds = [measure(), measure()]
        assert all(process.poll() is None for process in started)
    assert len(started) == 2 and all(process.poll() is not None for process in started)
    for found in rounds:
        assert list(found) == list(in_cache.KINDS)
        assert all(1e6 < rate.per_s < 1e12 and 1e6 < rate.clock < 1e11 for rate in found.values())


def test_the_instruction_set_is_that_of_the_update_beside_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    chosen: list[str] = []
    monkeypatch.setattr(in_cache._native, "set_isa", chosen.append)
    monkeypatch.setattr(in_cache, "tell", lambda seconds: None)
    in_cache.main(["--isa", "scalar", "--of-one"])
    in_cache.main(["--of-one"])
    assert chosen == ["scalar"]


def test_the_quickest_cores_come_first_and_the_thread_is_left_where_it_was(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    allowed = os.sched_getaffinity(0)
    of_cores = {core: float(1 + (core * 7) % 5) for core in allowed}

    def rate(call: object, seconds: float) -> float:
        (core,) = os.sched_getaffinity(0)
        return of_cores[core]

    monkeypatch.setattr(in_cache, "rate", rate)
    found = in_cache.quickest_cores(0.001)
    assert sorted(found) == sorted(allowed)
    assert [of_cores[core] for core in found] == sorted(of_cores.values(), reverse=True)
    assert os.sched_getaffinity(0) == allowed


def test_kernels_and_processes_stay_on_the_cores_they_are_given() -> None:
    allowed = os.sched_getaffinity(0)
    core = max(allowed)
    told = "import os; print(sorted(os.sched_getaffinity(0)))"
    with in_cache.on_cores([core]):
        assert os.sched_getaffinity(0) == {core}
        ended = subprocess.run(
            [sys.executable, "-c", told], capture_output=True, text=True, check=True
        )
        assert ended.stdout == f"[{core}]\n"
    assert os.sched_getaffinity(0) == allowed


def test_what_a_call_costs_is_no_arithmetic(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 0.0

    def costs_as_much_as_its_parameters(parameters: int) -> None:
        nonlocal now_s
        now_s += 0.002 + parameters * 0.002 / in_cache.PARAMETERS

    monkeypatch.setattr(time, "perf_counter", lambda: now_s)
    per_s = in_cache.rate(costs_as_much_as_its_parameters, 0.2)
    assert per_s == pytest.approx(in_cache.PARAMETERS / 0.002)  # half of it without


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


def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, then: str) -> None:
    """Processes that say that they are ready, and then do something else."""
    script = tmp_path / "stand_in.py"
    script.write_text(f"import sys\nprint('ready', flush=True)\n{then}\n")
    monkeypatch.setattr(in_cache, "__file__", str(script))
    monkeypatch.setattr(in_cache, "SLACK_S", BUSY_S)


@pytest.mark.parametrize("first", ["", "sys.stdin.buffer.read(1); "])
def test_a_process_that_ends_in_place_of_a_rate_says_why(
    first: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in(tmp_path, monkeypatch, f"{first}sys.exit('the reason')")
    with pytest.raises(RuntimeError, match="the reason"):
        in_cache.rates(2, seconds=0.1)


def test_processes_that_never_tell_their_rate_are_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, started: list[subprocess.Popen[bytes]]
) -> None:
    stand_in(tmp_path, monkeypatch, "sys.stdin.buffer.read()")
    clock, told = time.monotonic, in_cache._told
    asked: list[float] = []

    def told_late(process: subprocess.Popen[bytes], ends_s: float) -> bytes:
        asked.append(ends_s)
        return told(process, ends_s if len(asked) <= 2 else clock() + 0.2)  # both were ready

    monkeypatch.setattr(in_cache, "_told", told_late)
    with pytest.raises(RuntimeError, match="not done in time"):
        in_cache.rates(2, seconds=0.1)
    assert len(asked) == 3 and all(process.poll() is not None for process in started)
