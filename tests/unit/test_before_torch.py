"""A card that is nearly full holds what is planned for it in one piece."""

from __future__ import annotations

import os
import py_compile
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest

from fluxtrain.machine.before_torch import (
    GPU_NODE,
    GPU_NODES,
    NAMES,
    PAGE_BYTES,
    SETTING,
    SPINS,
    let_segments_grow,
    limit_within,
    segments_grow,
    share_cores,
)
from fluxtrain.units import GIB, MIB

ENGINE = Path(__file__).parents[2] / "engine"


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
from fluxtrain.machine import before_torch
before_torch.let_segments_grow = before_torch.share_cores = lambda: print("torch" in sys.modules)
from fluxtrain.cli import main
main(["train", "nothing.yaml"])
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False, timeout=120
    )
    assert (done.returncode, done.stdout) == (2, "False\nFalse\n"), done.stderr


def taken_in_pages(limit_bytes: int, blocks_bytes: Iterable[int]) -> int:
    """Memory that torch's allocator takes for these blocks, in segments that grow.

    As `alloc_block` and `map_block` of c10/cuda/CUDACachingAllocator.cpp have it in torch 2.11: the
    limit is compared with the block, and what is mapped for it are whole pages.
    """
    taken, last_page_left = 0, 0
    for block in blocks_bytes:
        if taken + block > limit_bytes:
            continue
        if block <= MIB:
            taken += 2 * MIB
            continue
        mapped = -(-max(0, block - last_page_left) // PAGE_BYTES) * PAGE_BYTES
        last_page_left += mapped - block
        taken += mapped
    return taken


@pytest.mark.parametrize("small_blocks", [0, 1, 7])
@pytest.mark.parametrize("block_mib", [10, 12, 16, 22, 38])
@pytest.mark.parametrize("left_mib", [1438, 1440, 1442, 3500])
def test_segments_that_grow_stay_within_what_is_left(
    left_mib: int, block_mib: int, small_blocks: int
) -> None:
    left_bytes = left_mib * MIB
    blocks = [MIB] * small_blocks + [block_mib * MIB] * 400
    limit_bytes = limit_within(left_bytes, grow=True)
    assert left_bytes - 2 * 40 * MIB < taken_in_pages(limit_bytes, blocks) <= left_bytes


def test_segments_of_fixed_sizes_keep_to_the_limit_itself() -> None:
    assert limit_within(GIB, grow=False) == GIB
    assert limit_within(MIB, grow=True) == 0


@pytest.mark.parametrize("name", NAMES)
def test_what_was_asked_of_torch_is_read_as_torch_reads_it(name: str) -> None:
    assert segments_grow({name: f"max_split_size_mb:64, {SETTING}"})
    assert not segments_grow({name: "expandable_segments:False"})
    assert not segments_grow({})


def test_without_a_gpu_threads_soon_sleep(tmp_path: Path) -> None:
    environment: dict[str, str] = {}
    share_cores(environment, tmp_path)
    assert environment == {"GOMP_SPINCOUNT": str(SPINS)}


@pytest.mark.parametrize("given", [{"GOMP_SPINCOUNT": "7"}, {"OMP_WAIT_POLICY": "active"}], ids=str)
def test_how_threads_wait_stays_as_it_was_set(given: dict[str, str], tmp_path: Path) -> None:
    environment = dict(given)
    share_cores(environment, tmp_path)
    assert environment == given


@pytest.mark.parametrize("node", GPU_NODES)
def test_beside_a_gpu_nothing_of_threads_is_set(node: str, tmp_path: Path) -> None:
    (tmp_path / node).parent.mkdir()
    (tmp_path / node).touch()
    environment: dict[str, str] = {}
    share_cores(environment, tmp_path)
    assert environment == {}


@pytest.mark.parametrize("state", ["uncompiled", "compiled", "copied"])
def test_compiled_modules_are_kept_where_python_would_compile_them_at_each_start(
    tmp_path: Path, state: str
) -> None:
    package = tmp_path / "site" / "torch"
    package.mkdir(parents=True)
    source = package / "__init__.py"
    source.touch()
    if state != "uncompiled":
        py_compile.compile(str(source))
    if state == "copied":  # by a tool that gives files the time of their copy
        os.utime(source, (0, 0))
    code = "from fluxtrain.machine.before_torch import keep_compiled as keep; keep(); import torch"
    paths = os.pathsep.join([str(package.parent), str(ENGINE)])
    environment = {"PYTHONDONTWRITEBYTECODE": "1", "XDG_CACHE_HOME": str(tmp_path / "cache")}
    subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, **environment, "PYTHONPATH": paths},
        check=True,
    )  # fmt: skip
    kept = list((tmp_path / "cache").rglob("torch/*.pyc"))
    assert len(kept) == (state != "compiled")
