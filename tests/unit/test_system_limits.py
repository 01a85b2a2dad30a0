"""Limits of threads and memory are found before a library runs into them."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from fluxtrain import system_limits
from fluxtrain.errors import DoesNotFit
from fluxtrain.reporting.failures import as_told
from fluxtrain.system_limits import OWN_THREADS, POOLS, fit_into_limits, startable

ENTER = """
import os, sys
open(sys.argv[1] + "/cgroup.procs", "w").write("0")  # this process
os.execv(sys.executable, [sys.executable, "-m", "fluxtrain", *sys.argv[2:]])
"""


class PanicException(BaseException):
    """What libraries in Rust raise."""


@pytest.fixture
def light(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a process that has not imported torch."""
    monkeypatch.delitem(sys.modules, "torch", raising=False)


def test_as_many_threads_are_startable_as_are_wanted_and_none_stays() -> None:
    import threading

    before = threading.active_count()
    assert startable(20) == 20
    assert threading.active_count() == before


@pytest.mark.usefixtures("light")
def test_fewer_threads_make_smaller_pools_with_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(system_limits, "startable", lambda wanted: OWN_THREADS + 7)
    told: list[str] = []
    found = {"OMP_NUM_THREADS": "64", "OPENBLAS_NUM_THREADS": "1", "RAYON_NUM_THREADS": "x"}
    fit_into_limits(["train"], told.append, found)
    assert [found[name] for name in POOLS] == ["2", "1", "2"] or os.cpu_count() == 1
    assert "allows 19 more threads" in told[0] and "ulimit -u" in told[0]


@pytest.mark.usefixtures("light")
def test_too_few_threads_are_refused_with_both_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(system_limits, "startable", lambda wanted: 3)
    with pytest.raises(DoesNotFit, match=r"allows 3 more threads .* needs 15.*ulimit -u"):
        fit_into_limits(["train"], print, {})
    fit_into_limits(["runs"], print, {})
    fit_into_limits([], print, {})


@pytest.mark.usefixtures("light")
def test_enough_threads_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    found: dict[str, str] = {"OMP_NUM_THREADS": "1"}
    fit_into_limits(["train"], pytest.fail, found)
    assert found == {"OMP_NUM_THREADS": "1"}


@pytest.mark.parametrize("threads", [1, 2, 6])
def test_a_command_in_a_group_of_few_threads_ends_with_three_and_words(
    limited: Callable[..., list[Path]], threads: int
) -> None:
    group = limited({"pids": {"pids.max": str(threads)}})[0]
    ended = subprocess.run(
        [sys.executable, "-c", ENTER, group, "train", "--demo", "--steps", "1"],
        capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip
    if "Permission" in ended.stderr or "No space left" in ended.stderr:
        pytest.skip("this process may not move into a group")
    assert ended.returncode == 3, ended.stderr
    assert ended.stderr.startswith(f"error: the system allows {threads - 1} more threads")


@pytest.mark.parametrize("limit_bytes", [500 << 20, 1 << 30])
def test_a_command_with_little_address_space_ends_with_three_and_words(limit_bytes: int) -> None:
    ended = subprocess.run(
        [sys.executable, "-m", "fluxtrain", "train", "--demo", "--steps", "1"],
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (limit_bytes, limit_bytes)),
        capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip
    assert ended.returncode == 3, ended.stderr
    assert "address space of this process is limited to" in ended.stderr
    assert "ulimit -v" in ended.stderr and "Traceback" not in ended.stderr


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (OSError(12, "Cannot allocate memory", "x"), 3),
        (ImportError("libx.so: failed to map segment from shared object"), 3),
        (RuntimeError("can't start new thread"), 3),
        (PanicException("ThreadPoolBuildError { kind: WouldBlock }"), 3),
        (PanicException("index out of bounds: the len is 0"), 2),
    ],
)
def test_what_libraries_raise_at_limits_has_its_code_and_cure(
    error: BaseException, code: int
) -> None:
    told = as_told(error)
    assert told is not None and told.exit_code == code
