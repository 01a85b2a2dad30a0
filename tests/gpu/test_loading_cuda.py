"""Host memory of a model that lives on a real GPU: while it is loaded, moves there and is saved."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from fluxtrain.units import MIB
from tests.engine.conftest import SENTENCES, VOCABULARY

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
SLACK_BYTES = 96 * MIB  # what CUDA and its copies from pages that are not locked take

MOVE = """
import json, re, sys, threading, time
from pathlib import Path
import torch
import fluxtrain
import fluxtrain.core.wrap.wrap
from fluxtrain.models.export import save_model
from fluxtrain.models.loading import ModelSource, load_model
from fluxtrain.plan.footprint import Layout, saving_bytes
from fluxtrain.plan.guard import loading_bytes
from fluxtrain.core.wrap.grouping import facts_of
from transformers.models import llama

def held():  # by this process alone: no pages of files
    told = open("/proc/self/status").read()
    return sum(int(kb) << 10 for kb in re.findall(r"Rss(?:Anon|Shmem):\\s+(\\d+)", told))

def watch():
    while not over.is_set():
        peak[0] = max(peak[0], held())
        time.sleep(0.001)

torch.ones(1 << 20, device="cuda").cpu()
before, peak, over, told = held(), [0], threading.Event(), {}
threading.Thread(target=watch, daemon=True).start()
def fits(empty, copied):
    facts, layout = facts_of(empty), Layout(offload="none")
    told.update(saving=saving_bytes(facts, layout), loading=loading_bytes(
        facts, layout, copied_bytes=copied.weights_bytes, sources_bytes=copied.sources_bytes))
model = load_model(ModelSource(path=sys.argv[1], dtype=sys.argv[2]), fits).model
fluxtrain.wrap(model, device="cuda", cards=1, offload="none")
torch.cuda.synchronize()
told["loading_peak"], held_after = peak[0] - before, held()
peak[0] = 0
save_model(model, None, Path(sys.argv[3]))
over.set()
print(json.dumps({**told, "left": held_after - before, "saving_peak": peak[0] - held_after}))
"""


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """640 MiB of bf16 weights in shards."""
    from fluxtrain.data.demo import train_tokenizer

    folder = tmp_path_factory.mktemp("loading") / "model"
    train_tokenizer(SENTENCES, folder, VOCABULARY)
    config = LlamaConfig(
        vocab_size=32_000, hidden_size=1024, intermediate_size=4096, num_hidden_layers=16,
        num_attention_heads=16, tie_word_embeddings=False, bos_token_id=None, eos_token_id=0,
        pad_token_id=0,
    )  # fmt: skip
    model = LlamaForCausalLM(config).to(torch.bfloat16)  # type: ignore[no-untyped-call]
    model.save_pretrained(folder, max_shard_size="150MB")
    return folder


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_model_on_the_gpu_takes_of_the_host_what_is_predicted(
    stored: Path, tmp_path: Path, dtype: str
) -> None:
    """Pages of files none on the way there, converted weights all; saving those of two groups."""
    ended = subprocess.run(
        [sys.executable, "-c", MOVE, str(stored), dtype, str(tmp_path / "saved")],
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    found = json.loads(ended.stdout.splitlines()[-1])
    assert (found["loading"] > 600 * MIB) == (dtype == "float32")
    assert found["loading_peak"] < found["loading"] + SLACK_BYTES, found
    assert found["left"] < SLACK_BYTES, found
    assert found["saving_peak"] < found["saving"] + SLACK_BYTES < 400 * MIB, found
