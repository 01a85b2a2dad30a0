"""Steps in backward: without clipping each group is updated as soon as its gradients are
complete."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

import fluxtrain
from fluxtrain.core.wrap.engine import engine_of
from fluxtrain.errors import MisusedModel
from tests.wrap_with import wrap_with

CONFIG = LlamaConfig(
    vocab_size=256,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    tie_word_embeddings=True,
)


def build(dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    return LlamaForCausalLM(CONFIG).to(dtype)


def losses_of(model: nn.Module, *, in_backward: bool, steps: int = 5) -> list[float]:
    engine = engine_of(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    torch.manual_seed(1)
    losses = []
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = 1e-2 / (step + 1)
        ids = torch.randint(0, 256, (4, 16))
        loss = model(input_ids=ids, labels=ids).loss
        if in_backward:
            engine.begin_step_in_backward(optimizer)
        loss.backward()
        if in_backward:
            assert engine.partly_updated
        norm = engine.clip_grad_norm(None)
        optimizer.step()
        assert not engine.partly_updated
        optimizer.zero_grad()
        losses.append((float(loss.detach()), norm.value()))
    engine.flush()
    return losses


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("device_groups", [0, 2])
def test_steps_in_backward_equal_exact_ones_without_clipping(
    dtype: torch.dtype, device_groups: int
) -> None:
    results = []
    for in_backward in (False, True):
        model = wrap_with(
            build(dtype),
            device="cpu",
            offload="weights",
            overlap=True,
            chunk_rows=2,
            device_groups=device_groups,
        )
        losses = losses_of(model, in_backward=in_backward)
        weights = {n: p.detach().clone() for n, p in model.named_parameters()}
        results.append((losses, weights))
    assert results[0][0] == results[1][0]
    assert all(torch.equal(results[1][1][n], w) for n, w in results[0][1].items())


def test_the_optimizers_state_and_step_counts_are_those_of_exact_steps() -> None:
    states = []
    for in_backward in (False, True):
        model = fluxtrain.wrap(build(torch.bfloat16), device="cpu", overlap=True)
        losses_of(model, in_backward=in_backward)
        shards = {
            f"{shard}.{name}": tensor.clone()
            for shard, tensors in engine_of(model).state_shards()
            for name, tensor in tensors.items()
        }
        states.append(shards)
    assert states[0].keys() == states[1].keys()
    assert all(torch.equal(states[1][name], tensor) for name, tensor in states[0].items())


def test_an_optimizer_that_is_not_taken_over_has_no_step_in_backward() -> None:
    model = fluxtrain.wrap(build(torch.float32), device="cpu")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(MisusedModel, match="SGD"):
        engine_of(model).begin_step_in_backward(optimizer)


def test_a_copy_of_the_model_has_no_in_backward_step_under_way() -> None:
    model = fluxtrain.wrap(build(torch.float32), device="cpu")
    optimizer = torch.optim.AdamW(model.parameters())
    engine_of(model).begin_step_in_backward(optimizer)
    assert "_fluxtrain_engine" not in copy.deepcopy(model).__dict__
