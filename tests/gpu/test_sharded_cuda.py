"""Sharded models and compressed sums on a GPU: one rank with NCCL, so that one card is enough."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed
from transformers import LlamaConfig, LlamaForCausalLM

from fluxtrain.config.parallel_settings import CommSettings, FsdpSettings
from fluxtrain.methods.optimizer import parameter_groups
from fluxtrain.parallel.compress.compressor import joined
from fluxtrain.parallel.compress.exchange import Exchange
from fluxtrain.parallel.compress.registry import COMPRESSORS, HYBRID, method_named
from fluxtrain.parallel.engine import ShardedAdamW, ShardedEngine
from fluxtrain.parallel.sharding import shard
from fluxtrain.units import MIB

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]


@pytest.fixture
def group(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A process group of this process alone."""
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)  # which torch replaces: put back
    store: Any = getattr(distributed, "HashStore")()  # noqa: B009 - not exported
    distributed.init_process_group("cpu:gloo,cuda:nccl", store=store, rank=0, world_size=1)
    yield distributed.group.WORLD
    distributed.destroy_process_group()


def sharded(model: Any, **settings: Any) -> ShardedEngine:
    plan: Any = None  # which nothing but a run asks
    return shard(model, torch.device("cuda", 0), FsdpSettings(**settings), CommSettings(), plan)


@pytest.mark.parametrize("offload", [False, True])
def test_a_sharded_model_learns_on_the_gpu(group: Any, offload: bool) -> None:
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(
        vocab_size=64, hidden_size=64, intermediate_size=96, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2,
    )).to(torch.bfloat16)  # fmt: skip
    engine = sharded(model, cpu_offload=offload)
    groups = parameter_groups(model, learning_rate=1e-2, weight_decay=0.0, no_decay=())
    optimizer = ShardedAdamW(engine, groups, lr=1e-2, fused=None if offload else True)
    rows = torch.randint(64, (4, 16), device="cuda")
    losses = []
    for step in range(8):
        if step == 4:  # as a resume does
            for name, tensors in dict(engine.state_shards()).items():
                engine.load_state_shard(name, tensors)
        loss = model(input_ids=rows, labels=rows, use_cache=False).loss
        loss.backward()
        norm = engine.clip_grad_norm(1.0, [loss])
        norm.skips = True
        optimizer.step()
        engine.forget_gradients()
        losses.append(norm.losses()[0])
    assert losses[-1] < 0.7 * losses[0]
    assert engine.memory().device_used_bytes
    engine.close()


def test_sharding_takes_no_more_than_the_shards_and_one_unit(group: Any) -> None:
    model = LlamaForCausalLM(LlamaConfig(
        vocab_size=64, hidden_size=1024, intermediate_size=4096, num_hidden_layers=8,
    )).to(torch.bfloat16).requires_grad_(False)  # fmt: skip
    whole = sum(p.nbytes for p in model.parameters())
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    engine = sharded(model)
    taken = torch.cuda.max_memory_allocated() - before
    engine.close()
    assert whole <= taken < 1.3 * whole  # a block is an eighth; all of them would be twice


@pytest.mark.parametrize("name", [*COMPRESSORS, HYBRID])
def test_what_is_encoded_on_the_gpu_is_what_the_processor_encodes(group: Any, name: str) -> None:
    compressor = method_named(name).compressor.for_ranks(2)
    rows = torch.randn(2, 1000) * 0.01
    proposal = compressor.proposal(rows)
    agreed = 0.0 if proposal is None else float(proposal)
    here, there = torch.Generator().manual_seed(0), torch.Generator("cuda").manual_seed(0)
    sent = compressor.encode(rows, here, agreed)
    on_host = compressor.decode(sent, 1000, agreed)
    wire = compressor.encode(rows.cuda(), there, agreed)
    on_gpu = compressor.decode(wire, 1000, agreed)
    assert joined(wire).shape == joined(sent).shape
    if name == "sketch":  # values of one cell are estimated alike: which of them is kept differs
        on_gpu, on_host = on_gpu.abs().sort(1).values, on_host.abs().sort(1).values
    if compressor.bias != "unbiased" and name not in ("signsgd", "powersgd", "gradiveq"):
        torch.testing.assert_close(on_gpu.cpu(), on_host, rtol=1e-3, atol=1e-5)
    exchange = Exchange(method_named(name), group, torch.device("cuda", 0))
    total = exchange.scatter_sum(rows[:1].cuda(), "rows")
    assert total.is_cuda and torch.isfinite(total).all()
    assert exchange.seconds().encode_s > 0


@pytest.mark.parametrize("name", ["int8", "fp8"])
@pytest.mark.parametrize(("block", "count"), [(128, 1000), (8, 4097), (1024, 12_800)])
def test_kernels_encode_the_bits_of_the_plain_operations(name: str, block: int, count: int) -> None:
    compressor: Any = method_named(name).compressor
    compressor = replace(compressor, block=block)
    rows = torch.randn(3, count) * 0.01
    rows[0, :block] = 0
    draws = torch.Generator()
    codes, scales = compressor.encode(rows, draws)
    found = compressor.encode(rows.cuda(), draws)
    assert torch.equal(found[0].cpu(), codes) and torch.equal(found[1].cpu(), scales)
    plain = compressor.decode((codes, scales), count)
    assert torch.equal(compressor.decode(found, count).cpu(), plain)
    rows[1, 5], rows[2, -1] = torch.nan, torch.inf
    broken = compressor.decode(compressor.encode(rows.cuda(), draws), count)
    assert broken[:2].isfinite().all(1).tolist() == [True, False] and not broken[2].isfinite().all()


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_dry_run_of_ranks_is_predicted_and_measured(
    ranks: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))  # so that it times a block and copies
    if torch.cuda.device_count() < ranks:
        pytest.skip("needs two NVIDIA GPUs")
    settings = [f"parallel.processes={ranks}", "parallel.mode=fsdp", "train.batch_rows=8"]
    words = [word for setting in settings for word in ("--set", setting)]
    command = [sys.executable, "-m", "fluxtrain", "dry-run", "--demo", "--json", *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout)
    assert found["losses"][0] > found["losses"][-1]
    assert found["step_s"]["predicted"] and found["step_s"]["measured"], found
    peak = found["device_bytes"]  # beside cuBLAS's workspaces, in whole segments
    assert peak["measured"] - 128 * MIB < peak["predicted"] < 2.5 * peak["measured"], found
