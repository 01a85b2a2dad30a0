"""A card that is nearly full holds what is planned for it in one piece."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from fluxtrain.hardware.allocator import GPU_NODE, NAMES, SETTING, let_segments_grow


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Of a machine with a GPU."""
    (tmp_path / GPU_NODE).parent.mkdir()
    (tmp_path / GPU_NODE).touch()
    return tmp_path


def test_segments_grow_where_there_is_a_gpu(root: Path) -> None:
    environment: dict[str, str] = {}
    let_segments_grow(environment, root)
    assert environment == {"PYTORCH_CUDA_ALLOC_CONF": SETTING}


@pytest.mark.parametrize("name", NAMES)
def test_what_the_user_has_set_stays(name: str, root: Path) -> None:
    environment = {name: "max_split_size_mb:64"}
    let_segments_grow(environment, root)
    assert environment == {name: "max_split_size_mb:64"}


def test_without_a_gpu_nothing_is_set(tmp_path: Path) -> None:
    environment: dict[str, str] = {}
    let_segments_grow(environment, tmp_path)
    assert environment == {}


def test_the_command_says_it_before_torch_is_imported() -> None:
    script = """
import sys
import fluxtrain.hardware.allocator as allocator
allocator.let_segments_grow = lambda: print("torch" in sys.modules)
from fluxtrain.cli import main
main(["train", "nothing.yaml"])
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False, timeout=120
    )
    assert (done.returncode, done.stdout) == (2, "False\n"), done.stderr
