"""On a GPU the optimizers of other packages train a resident model, where they are installed."""

from __future__ import annotations

import importlib.util
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

import fluxtrain
from fluxtrain.core.optimizer.third_party import (
    THIRD_PARTY,
    ThirdPartyOptimizer,
    third_party_optimizer,
)
from fluxtrain.core.wrap.engine import engine_of
from fluxtrain.core.wrap.grouping import facts_of
from fluxtrain.plan.states import THIRD_PARTY_FORMATS

pytestmark = pytest.mark.gpu
NAMES = pytest.mark.parametrize("name", list(THIRD_PARTY))
DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
RATE = 1e-3


@pytest.fixture(autouse=True)
def installed(name: str) -> None:
    package = THIRD_PARTY[name].package
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")


def plain(dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=256, intermediate_size=512, num_hidden_layers=4, num_attention_heads=4,
        vocab_size=1024, max_position_embeddings=256,
    )  # fmt: skip
    return LlamaForCausalLM(config).to(dtype).train()


def wrapped(dtype: torch.dtype, name: str) -> tuple[nn.Module, ThirdPartyOptimizer]:
    model = fluxtrain.wrap(plain(dtype), device="cuda", cards=1, offload="none", chunk_rows=4)
    groups = [{"params": list(model.parameters()), "weight_decay": 0.1}]
    make = partial(third_party_optimizer, name, lr=RATE, betas=(0.9, 0.999), eps=1e-8)
    return model, ThirdPartyOptimizer(engine_of(model), groups, make)


def step(model: nn.Module, optimizer: ThirdPartyOptimizer, seed: int) -> float:
    torch.manual_seed(seed)  # of stochastic rounding too
    ids = torch.randint(0, 1024, (8, 64)).cuda()
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    engine_of(model).clip_grad_norm(1.0, [loss])
    optimizer.step()
    optimizer.zero_grad()
    return float(loss.detach())


@NAMES
@DTYPES
def test_it_learns_as_our_own_states_do(name: str, dtype: torch.dtype) -> None:
    model, optimizer = wrapped(dtype, name)
    own = fluxtrain.wrap(
        plain(dtype), device="cuda", cards=1, offload="none", chunk_rows=4, states="8bit"
    )
    our_optimizer: Any = torch.optim.AdamW(own.parameters(), lr=RATE, weight_decay=0.1)
    losses = [
        [step(one, its, number % 3) for number in range(40)]
        for one, its in ((model, optimizer), (own, our_optimizer))
    ]
    assert losses[0][-1] < losses[0][0] - 1.0
    assert losses[0][-1] == pytest.approx(losses[1][-1], rel=0.1)


@NAMES
@DTYPES
def test_its_state_comes_back_and_training_goes_on_with_the_same_losses(
    name: str, dtype: torch.dtype
) -> None:
    model, optimizer = wrapped(dtype, name)
    for seed in range(3):
        step(model, optimizer, seed)
    shards = {
        shard: {key: tensor.cpu().clone() for key, tensor in tensors.items()}
        for shard, tensors in engine_of(model).state_shards()
    }
    [(own, state)] = optimizer.state_shards()
    again, resumed = wrapped(dtype, name)
    for shard, tensors in shards.items():
        engine_of(again).load_state_shard(shard, tensors)
    assert resumed.load_state_shard(own, {key: t.clone() for key, t in state.items()})
    for seed in range(3, 6):
        assert step(model, optimizer, seed) == step(again, resumed, seed)


@pytest.mark.parametrize("name", ["bnb-adamw-8bit", "torchao-adamw-4bit"])
def test_the_device_holds_what_the_plan_counts(name: str) -> None:
    facts = facts_of(plain(torch.bfloat16)).without_masters(THIRD_PARTY_FORMATS[name])
    model, optimizer = wrapped(torch.bfloat16, name)
    step(model, optimizer, 0)  # compiles, and makes the states
    torch.cuda.synchronize()
    states = sum(
        sum(getattr(value, inner).nbytes for inner in value.__tensor_flatten__()[0])
        if hasattr(value, "__tensor_flatten__")
        else value.nbytes
        for state in optimizer.inner.state.values()
        for key, value in state.items()
        if isinstance(value, torch.Tensor) and value.numel() > 1 and "qmap" not in key
    )
    assert states == pytest.approx(sum(g.state_bytes for g in facts.groups), rel=0.02)
