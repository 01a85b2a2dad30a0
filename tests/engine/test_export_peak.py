"""The memory that a merge takes does not grow with the model."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tests.engine.adapter_folders import make_adapter

# Memory of weights as small as here is else kept by the allocator, for each of four threads.
GIVEN_BACK = {"MALLOC_MMAP_THRESHOLD_": "65536"}
_MERGE = """
import sys, threading, time
from pathlib import Path
from tests.engine.adapter_folders import exported

def anonymous() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))

adapter, small, packed = sys.argv[1:]
exported(small, check=False, packed=packed or None)  # packages and their buffers are there now
peak, ended, before = [0], threading.Event(), anonymous()

def sample() -> None:
    while not ended.is_set():
        peak[0] = max(peak[0], anonymous())
        time.sleep(0.001)

thread = threading.Thread(target=sample)
thread.start()
exported(adapter, check=False, packed=packed or None)
ended.set()
thread.join()
print(peak[0] - before)
"""


def made(folder: Path, tokenizer: Path, layers: int) -> tuple[Path, Path]:
    """A base of so many blocks and an adapter for it."""
    shutil.copytree(tokenizer, folder / "base")
    config = LlamaConfig(
        vocab_size=320, hidden_size=512, intermediate_size=2048, num_hidden_layers=layers,
        num_attention_heads=8, num_key_value_heads=8, bos_token_id=None, eos_token_id=0,
        pad_token_id=0,
    )  # fmt: skip
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder / "base")
    return folder / "base", make_adapter(folder / "base", folder / "adapter", r=2)


@pytest.mark.parametrize("packed", ["", "nf4-double"])
@pytest.mark.slow
def test_a_merge_holds_some_weights_and_no_shard(
    packed: str, tokenizer_folder: Path, tmp_path: Path
) -> None:
    _, small = made(tmp_path / "small", tokenizer_folder, 2)
    base, adapter = made(tmp_path / "large", tokenizer_folder, 12)
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", _MERGE, str(adapter), str(small), packed],
        capture_output=True, text=True, check=False, timeout=300,
        cwd=Path(__file__).parents[2], env=os.environ | GIVEN_BACK,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    largest = 4 * 512 * 2048  # in fp32
    whole = (base / "model.safetensors").stat().st_size
    assert whole > 20 * largest
    assert int(done.stdout) < 8 * largest + (16 << 20)
    merged = tmp_path / "large" / "adapter-merged"
    assert (merged / "model.safetensors").stat().st_size == pytest.approx(whole, rel=0.01)
