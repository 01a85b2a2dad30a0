"""What loading takes of host memory: as predicted, and no more than a control group has."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

from fluxtrain.units import MIB
from tests.engine import forked
from tests.engine.conftest import VOCABULARY

V2 = Path("/sys/fs/cgroup/cgroup.controllers").exists()
SLACK_BYTES = 32 * MIB  # tokenizer, module objects, threads
SHAPE = {
    "vocab_size": VOCABULARY, "hidden_size": 512, "intermediate_size": 2048,
    "num_hidden_layers": 12, "num_attention_heads": 8, "num_key_value_heads": 8,
    "tie_word_embeddings": False, "bos_token_id": None, "eos_token_id": 0, "pad_token_id": 0,
}  # fmt: skip

# Libraries are imported first: what they take is no part of what is measured, or of a group.
LOAD = """
import ctypes, gc, json, os, re, sys, threading, time
folder, dtype, adopts, groups = sys.argv[1], sys.argv[2], sys.argv[3] == "adopts", sys.argv[4:]
import torch
import fluxtrain
import fluxtrain.core.wrap.wrap
from fluxtrain.core.memory.mapped import copied_bytes
from fluxtrain.models.loading import ModelSource, load_model
from fluxtrain.plan.footprint import Layout
from fluxtrain.plan.guard import loading_bytes
from fluxtrain.core.wrap.grouping import facts_of
from transformers.models import llama, mixtral
torch.set_num_threads(1)
ctypes.CDLL(None).mallopt(-8, 4)  # M_ARENA_MAX
gc.freeze()  # a collection would write to pages that are still those of the process before
for group in groups:
    open(group + "/cgroup.procs", "w").write("0")  # this process

def held():  # by this process alone: no pages of files
    told = open("/proc/self/status").read()
    return sum(int(kb) << 10 for kb in re.findall(r"Rss(?:Anon|Shmem):\\s+(\\d+)", told))

before, peak, over = held(), [0], threading.Event()
def watch():
    while not over.is_set():
        peak[0] = max(peak[0], held())
        time.sleep(0.001)
watching = threading.Thread(target=watch)
watching.start()
told = {}
def fits(empty, copied):
    told.update(copied=copied.weights_bytes, sources=copied.sources_bytes, predicted=loading_bytes(
        facts_of(empty), Layout(offload="weights"),
        copied_bytes=copied.weights_bytes, sources_bytes=copied.sources_bytes))
model = load_model(ModelSource(path=folder, dtype=dtype), fits).model
told["weights"] = sum(p.nbytes for p in model.parameters())
if adopts:
    fluxtrain.wrap(model, device="cpu", offload="weights")
over.set()
watching.join()
print(json.dumps({**told, "peak": peak[0] - before}))
"""


def _stored(folder: Path, tokenizer: Path, model: Any) -> Path:
    shutil.copytree(tokenizer, folder)
    model.to(torch.bfloat16).save_pretrained(folder, max_shard_size="24MB")
    assert len(list(folder.glob("model-*.safetensors"))) > 2
    return folder


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory, tokenizer_folder: Path) -> Path:
    """96 MiB of bf16 weights in shards."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SHAPE))
    return _stored(tmp_path_factory.mktemp("loading") / "dense", tokenizer_folder, model)


@pytest.fixture(scope="module")
def experts(tmp_path_factory: pytest.TempPathFactory, tokenizer_folder: Path) -> Path:
    """The same shape with four layers of eight experts, which are stored one by one."""
    torch.manual_seed(0)
    shape = {**SHAPE, "num_hidden_layers": 4, "num_local_experts": 8, "intermediate_size": 1024}
    model = MixtralForCausalLM(MixtralConfig(**shape))
    return _stored(tmp_path_factory.mktemp("loading") / "experts", tokenizer_folder, model)


def load(
    folder: Path, dtype: str, then: str = "adopts", groups: list[Path] | None = None
) -> subprocess.CompletedProcess[str]:
    """In a process of its own, which enters `groups` when it has its libraries."""
    return forked.python("-c", LOAD, folder, dtype, then, *(groups or []))


def measured(ended: subprocess.CompletedProcess[str]) -> dict[str, int]:
    if "Permission" in ended.stderr:
        pytest.skip("this process may not move into a group")
    assert ended.returncode == 0, ended.stderr
    told: dict[str, int] = json.loads(ended.stdout.splitlines()[-1])
    return told


def test_loading_and_adopting_converted_weights_takes_what_is_predicted(dense: Path) -> None:
    """All copies at once, which then go home one group after the other."""
    found = measured(load(dense, "float32"))
    assert found["copied"] == found["weights"] > 180 * MIB
    assert found["copied"] < found["predicted"] < 1.1 * found["copied"]
    assert found["predicted"] - 8 * MIB < found["peak"] < found["predicted"] + SLACK_BYTES


def test_loading_weights_as_they_are_stored_takes_nothing(dense: Path) -> None:
    found = measured(load(dense, "bfloat16", "leaves"))
    assert found["copied"] == found["predicted"] == 0 and found["weights"] > 90 * MIB
    assert found["peak"] < SLACK_BYTES


def test_adopting_mapped_weights_takes_their_arenas_alone(dense: Path) -> None:
    found = measured(load(dense, "bfloat16"))
    assert found["weights"] < found["peak"] < found["weights"] + SLACK_BYTES


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_merging_experts_takes_no_more_than_is_predicted(experts: Path, dtype: str) -> None:
    """At most all sources are converted before the first are merged: that is the threads' race."""
    found = measured(load(experts, dtype))
    assert found["copied"] > 0.7 * found["weights"]
    assert (found["sources"] > 0) == (dtype == "float32")
    assert found["copied"] < found["peak"] < found["predicted"] + SLACK_BYTES


@pytest.fixture
def group_of(limited: Callable[..., list[Path]]) -> Callable[[int], list[Path]]:
    """`group_of(bytes)`: a control group with so much memory and no more."""
    name = "memory.max" if V2 else "memory.limit_in_bytes"
    return lambda limit_bytes: limited({"memory": {name: str(limit_bytes)}})


def test_a_model_larger_than_its_memory_loads_where_its_files_are_mapped(
    dense: Path, group_of: Callable[[int], list[Path]]
) -> None:
    groups = group_of(2 * SLACK_BYTES)
    found = measured(load(dense, "bfloat16", "leaves", groups))
    assert found["weights"] > 1.4 * 2 * SLACK_BYTES, (
        "every weight was read, to see that it is finite"
    )


def test_converted_weights_in_less_memory_than_is_predicted_end_the_process(
    dense: Path, group_of: Callable[[int], list[Path]]
) -> None:
    """So what the guard refuses would not have worked."""
    predicted = measured(load(dense, "float32", "leaves"))["predicted"]
    ended = load(dense, "float32", "leaves", group_of(int(0.85 * predicted)))
    assert ended.returncode == -signal.SIGKILL, (ended.returncode, ended.stderr)


def test_converted_weights_load_in_the_memory_that_is_predicted(
    dense: Path, group_of: Callable[[int], list[Path]]
) -> None:
    predicted = measured(load(dense, "float32", "leaves"))["predicted"]
    measured(load(dense, "float32", "leaves", group_of(predicted + SLACK_BYTES)))
