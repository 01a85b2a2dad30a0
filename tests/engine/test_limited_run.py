"""A process in a real control group plans inside its limit, and trains inside it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fluxtrain.plan.search import BATCH_LIMIT_ROWS
from fluxtrain.units import MIB

LIMIT_BYTES = 800 * MIB
V2 = Path("/sys/fs/cgroup/cgroup.controllers").exists()
ENTER = """
import os, sys
for group in sys.argv[1].split(":"):
    open(group + "/cgroup.procs", "w").write("0")  # this process
os.execv(sys.executable, [sys.executable, "-m", "fluxtrain", *sys.argv[2:]])
"""
LONG_ROWS = ("--set", "data.sequence_length=512", "--set", "train.batch_rows=auto")


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where rates are kept: the first test measures them."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def inside(
    limited: Callable[..., list[Path]], tmp_path: Path, cache: Path
) -> Callable[..., subprocess.CompletedProcess[str]]:
    """`inside(arguments)`: the command in a group with a memory limit."""
    name = "memory.max" if V2 else "memory.limit_in_bytes"
    groups = limited({"memory": {name: str(LIMIT_BYTES)}})

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        places = ":".join(map(str, groups))
        ended = subprocess.run(
            [sys.executable, "-c", ENTER, places, *arguments],
            env={**os.environ, "FLUXTRAIN_RUNS": str(tmp_path), "XDG_CACHE_HOME": str(cache)},
            capture_output=True, text=True, timeout=250, check=False,
        )  # fmt: skip
        if "Permission" in ended.stderr or "No space left" in ended.stderr:
            pytest.skip("this process may not move into a group")
        return ended

    return run


def peak_bytes() -> int:
    """The most that any group of the tests has held (the one that is there now)."""
    name = "memory.peak" if V2 else "memory.max_usage_in_bytes"
    root = Path("/sys/fs/cgroup") if V2 else Path("/sys/fs/cgroup/memory")
    return max(int((g / name).read_text()) for g in root.glob(f"fluxtrain-test-{os.getpid()}-*"))


def test_a_plan_in_a_group_stays_inside_its_limit(inside: Callable[..., Any]) -> None:
    planned = inside("plan", "--demo", *LONG_ROWS, "--json")
    assert planned.returncode == 0, planned.stderr
    plan = json.loads(planned.stdout)
    assert plan["host_limit_bytes"] <= LIMIT_BYTES
    # pages of libraries count to the process, and to no group or another one
    assert plan["host_bytes"] <= 1.05 * LIMIT_BYTES
    assert plan["layout"]["batch_rows"] < BATCH_LIMIT_ROWS, "what a machine with room would take"
    assert peak_bytes() < LIMIT_BYTES, "the measurements of the probe too"


@pytest.mark.slow
def test_what_is_beyond_the_limit_is_refused_with_its_numbers(inside: Callable[..., Any]) -> None:
    rows = ("--set", "data.sequence_length=512", "--set", "train.batch_rows=256")
    refused = inside("plan", "--demo", *rows, "--set", "placement.chunk_rows=256")
    assert refused.returncode == 3, refused.stdout
    assert "does not fit" in refused.stderr and "host memory" in refused.stderr


@pytest.mark.slow
def test_the_demo_trains_inside_the_limit_of_its_group(
    inside: Callable[..., Any], tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    steps = ("--set", "train.steps=2", "--set", "data.held_out=0.002")
    ended = inside("train", "--demo", *LONG_ROWS, *steps, "--run-dir", str(run_dir))
    assert ended.returncode == 0, ended.stderr
    assert peak_bytes() <= LIMIT_BYTES
    plan = json.loads((run_dir / "plan.json").read_text())
    assert plan["host_bytes"] <= LIMIT_BYTES + 64 * MIB
    assert (run_dir / "model" / "model.safetensors").exists()
