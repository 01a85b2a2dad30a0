"""Threads that wait for each other leave the cores to others where the processor computes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from fluxtrain.machine.before_torch import GPU_NODES, SPINS, share_cores


def test_without_a_gpu_threads_soon_sleep(tmp_path: Path) -> None:
    environment: dict[str, str] = {}
    share_cores(environment, tmp_path)
    assert environment == {"GOMP_SPINCOUNT": str(SPINS)}


@pytest.mark.parametrize("given", [{"GOMP_SPINCOUNT": "7"}, {"OMP_WAIT_POLICY": "active"}], ids=str)
def test_what_the_user_has_set_stays(given: dict[str, str], tmp_path: Path) -> None:
    environment = dict(given)
    share_cores(environment, tmp_path)
    assert environment == given


@pytest.mark.parametrize("node", GPU_NODES)
def test_beside_a_gpu_nothing_is_set(node: str, tmp_path: Path) -> None:
    (tmp_path / node).parent.mkdir()
    (tmp_path / node).touch()
    environment: dict[str, str] = {}
    share_cores(environment, tmp_path)
    assert environment == {}


def test_the_command_says_it_before_torch_is_imported() -> None:
    script = """
import sys
import fluxtrain.machine.before_torch as openmp
openmp.share_cores = lambda: print("torch" in sys.modules)
from fluxtrain.cli import main
main(["train", "nothing.yaml"])
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False, timeout=120
    )
    assert (done.returncode, done.stdout) == (2, "False\n"), done.stderr
