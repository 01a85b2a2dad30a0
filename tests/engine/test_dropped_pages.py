"""Packing a mapped model takes the memory of its packed form, whatever the size of its files."""

from __future__ import annotations

import json
import mmap
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn

from fluxtrain.core.memory.mapped import drop, resident_bytes
from fluxtrain.machine.disk import read_disk
from tests.engine.pages import made_bytes

pytestmark = pytest.mark.skipif(
    not Path("/proc/self/maps").exists(), reason="mapped files are listed in /proc"
)

ROWS, COLUMNS, BLOCKS = 4096, 8192, 9  # 64 MiB a block in bf16, 604 MB in all


def saved(path: Path, blocks: int, rows: int, columns: int) -> Path:
    weight = torch.randn(rows, columns).mul_(0.02).bfloat16()
    weight[0, 0] = 1.0
    save_file({f"block.{i}": weight.clone() for i in range(blocks)}, path)
    with path.open("r+b") as file:
        os.fsync(file.fileno())  # the page cache keeps what is not yet on the disk
    return path


def test_pages_of_a_packed_weight_leave_process_and_page_cache(tmp_path: Path) -> None:
    path = saved(tmp_path / "model.safetensors", 2, 2048, 4096)  # a folio is smaller
    with safe_open(path, framework="pt") as file:
        first, second = file.get_tensor("block.0"), file.get_tensor("block.1")
    before = first.clone(), second.clone()
    size = drop(first)
    assert first.nbytes - 2 * mmap.PAGESIZE < size <= first.nbytes
    if read_disk(path).in_memory is False:
        aligned = -first.data_ptr() % mmap.PAGESIZE // 2  # mincore(2) begins with a page
        assert made_bytes(first.view(-1)[aligned:]) < first.nbytes // 4
    assert torch.equal(first, before[0])  # read again from the file
    assert torch.equal(second, before[1])


MEASURED = textwrap.dedent("""
    import json, sys, threading, time
    import torch
    from safetensors import safe_open
    from fluxtrain.core.memory.mapped import drop
    from fluxtrain.core.quantization.layout import PackedLayout
    from fluxtrain.core.quantization.packing import pack

    path, blocks = sys.argv[1], int(sys.argv[2])
    torch.set_num_threads(1)

    def resident(kind):
        for line in open("/proc/self/status"):
            if line.startswith(kind):
                return int(line.split()[1]) * 1024

    shape = None
    def packed(index, drops):
        global shape
        with safe_open(path, framework="pt") as file:
            weight = file.get_tensor(f"block.{index}")
        layout = PackedLayout.of("nf4-double", [weight.shape])
        memory = torch.zeros(layout.size_bytes, dtype=torch.uint8)
        pack(layout, 0, weight, memory)
        if drops:
            assert drop(weight) > 0.99 * weight.nbytes
        return memory, weight

    packed(0, True)  # libraries and threads are there now
    start, most, done = (resident("RssAnon"), resident("RssFile")), [0, 0], threading.Event()
    def watch():
        while not done.wait(0.002):
            most[0] = max(most[0], resident("RssAnon") - start[0])
            most[1] = max(most[1], resident("RssFile") - start[1])
    watcher = threading.Thread(target=watch)
    watcher.start()
    held = [packed(index, sys.argv[3] == "drop") for index in range(blocks)]
    time.sleep(0.02)
    done.set()
    watcher.join()
    print(json.dumps([most[0], most[1], sum(memory.nbytes for memory, _ in held)]))
""")


@pytest.mark.parametrize("drops", [True, False])
@pytest.mark.thinned(1)
def test_packing_a_mapped_model_takes_its_packed_size_and_one_block(
    tmp_path: Path, drops: bool
) -> None:
    """Anonymous memory never holds the model, and pages of its files none that are dropped."""
    path = saved(tmp_path / "model.safetensors", BLOCKS, ROWS, COLUMNS)
    block_bytes = ROWS * COLUMNS * 2
    command = [sys.executable, "-c", MEASURED, str(path), str(BLOCKS), "drop" if drops else "keep"]
    answer = subprocess.run(command, stdout=subprocess.PIPE, check=True)
    anonymous_bytes, file_bytes, packed_bytes = json.loads(answer.stdout)
    path.unlink()
    assert packed_bytes < 0.26 * BLOCKS * block_bytes
    assert packed_bytes * 0.9 < anonymous_bytes < packed_bytes + block_bytes
    if drops:
        assert file_bytes < 1.5 * block_bytes
    else:
        assert file_bytes > (BLOCKS - 1) * block_bytes


def test_resident_bytes_of_a_mapped_model_are_the_pages_that_were_read(tmp_path: Path) -> None:
    path = saved(tmp_path / "model.safetensors", 4, 1024, 2048)  # 4 MiB each
    model = nn.ParameterList(nn.Parameter(t, False) for t in load_file(path).values())
    size = model[0].nbytes
    for weight in model:
        drop(weight.detach(), from_cache=False)
    before = resident_bytes(model)
    assert before < size
    model[1].sum()
    assert 0.9 * size < resident_bytes(model) - before < 1.6 * size
    copy = nn.ParameterList([nn.Parameter(torch.ones(1024, 2048))])
    assert resident_bytes(copy) == copy[0].nbytes
