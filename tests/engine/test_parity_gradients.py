"""Streamed equals resident bit for bit, and equals the model that was never wrapped."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fluxtrain
from fluxtrain.core.wrap.engine import engine_of

Grads = Callable[[nn.Module], dict[str, Tensor]]
STREAMED = ("weights", "max", "optimizer")
DTYPES = (torch.float32, torch.bfloat16)


def backward(model: nn.Module, inputs: dict[str, Tensor]) -> Tensor:
    loss: Tensor = model(**inputs).loss
    loss.backward()
    return loss.detach()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.thinned(7)
def test_streamed_gradients_equal_resident_ones_bit_for_bit(
    family: str, dtype: torch.dtype, tiny: Any, batch: Any, grads: Grads, same: Any
) -> None:
    inputs = batch(family, dtype=dtype)
    models = [fluxtrain.wrap(tiny(family, dtype), offload=o) for o in ("none", *STREAMED)]
    for chunk_rows in (4, 3):
        found = []
        for model in models:
            engine_of(model).chunk_rows = chunk_rows
            model.zero_grad()
            found.append({"loss": backward(model, inputs), **grads(model)})
        assert len(found[0]) == 1 + len(list(models[0].parameters()))
        for streamed in found[1:]:
            same(streamed, found[0])


def test_fp32_loss_and_gradients_equal_the_plain_models(
    family: str, tiny: Any, batch: Any, grads: Grads, close: Any
) -> None:
    inputs = batch(family)
    plain = tiny(family)
    wrapped = fluxtrain.wrap(copy.deepcopy(plain))
    expected, got = backward(plain, inputs), backward(wrapped, inputs)
    assert abs(float(got - expected)) <= 2e-6 * abs(float(expected))
    close(grads(plain), grads(wrapped), 1e-5)


@pytest.mark.parametrize("family", ["llama", "gpt2", "vit", "mamba"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_whole_batch_without_the_fused_head_equals_the_plain_model_bit_for_bit(
    family: str, dtype: torch.dtype, tiny: Any, batch: Any, grads: Grads, same: Any
) -> None:
    inputs = batch(family, dtype=dtype)
    labels = inputs.pop("labels")
    found = []
    for wrapped in (False, True):
        model = tiny(family, dtype)
        if wrapped:
            fluxtrain.wrap(model, chunk_rows=4)
        logits = model(**inputs).logits + 0  # materialises
        loss = nn.functional.cross_entropy(logits.float().flatten(0, -2), labels.flatten())
        loss.backward()
        found.append({"loss": loss.detach(), **grads(model)})
    same(found[0], found[1])


@pytest.mark.parametrize("chunk_rows", [1, 4])
def test_bf16_gradients_are_as_near_to_fp32_ones_as_the_plain_models(
    chunk_rows: int, tiny: Any, batch: Any, grads: Grads
) -> None:
    inputs = batch("llama")
    exact = tiny("llama")
    exact.load_state_dict(tiny("llama", torch.bfloat16).state_dict())
    backward(exact, inputs)
    plain = tiny("llama", torch.bfloat16)
    backward(plain, inputs)
    wrapped = fluxtrain.wrap(tiny("llama", torch.bfloat16), chunk_rows=chunk_rows)
    backward(wrapped, inputs)
    true, ours, theirs = grads(exact), grads(wrapped), grads(plain)

    def error(found: dict[str, Tensor]) -> float:
        off = sum(float((found[n].double() - true[n].double()).square().sum()) for n in true)
        return off**0.5

    assert error(ours) <= 1.2 * error(theirs)


def test_chunks_give_the_gradients_of_the_whole_batch(
    family: str, tiny: Any, batch: Any, grads: Grads, close: Any
) -> None:
    found = {}
    for chunk_rows in (5, 2, 1):
        model = fluxtrain.wrap(tiny(family), chunk_rows=chunk_rows)
        found[chunk_rows] = {"loss": backward(model, batch(family, rows=5)), **grads(model)}
    close(found[5], found[2], 1e-5)
    close(found[5], found[1], 1e-5)


def test_separate_backward_passes_add_up_to_the_sum_over_all_rows(
    tiny: Any, batch: Any, grads: Grads, close: Any
) -> None:
    """Weighted by tokens: each pass divides by the tokens of the whole batch."""
    whole = batch("llama", rows=4)
    tokens = int((whole["labels"][:, 1:] != -100).sum())
    for dtype, limit in ((torch.float32, 1e-5), (torch.bfloat16, 2e-2)):
        found = []
        for cuts in ([4], [1, 3], [1, 1, 1, 1]):
            model = fluxtrain.wrap(tiny("llama", dtype), chunk_rows=4)
            for rows in zip(*(whole[k].split(cuts) for k in whole), strict=True):
                part = dict(zip(whole, rows, strict=True))
                model(**part, num_items_in_batch=tokens).loss.backward()
            found.append(grads(model))
        close(found[0], found[1], limit)
        close(found[0], found[2], limit)


def test_chunks_inside_one_step_equal_micro_batches_bit_for_bit(tiny: Any, grads: Grads) -> None:
    """One row a chunk, one row's tokens a chunk of the head: the sums have the same terms in the
    same order as one backward pass a row. (The number of tokens is a power of two, as the head
    divides its sum once; the final norm sums over all rows at once.)"""
    draw = torch.Generator().manual_seed(1)
    ids = torch.stack([torch.randperm(96, generator=draw)[:9] for _ in range(4)])
    tokens = ids[:, 1:].numel()  # 32
    chunked = fluxtrain.wrap(tiny("llama"), chunk_rows=1)
    engine_of(chunked).head_tokens = 9
    chunked(input_ids=ids, labels=ids, num_items_in_batch=tokens).loss.backward()
    summed = fluxtrain.wrap(tiny("llama"))
    for row in ids.split(1):
        summed(input_ids=row, labels=row, num_items_in_batch=tokens).loss.backward()
    one, many = grads(chunked), grads(summed)
    exact = [name for name in one if name != "model.norm.weight"]
    assert len(exact) == len(list(chunked.parameters())) - 1
    assert all(torch.equal(one[name], many[name]) for name in exact)
    assert torch.allclose(one["model.norm.weight"], many["model.norm.weight"], rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize("offload", ["none", "weights", "max"])
def test_several_forwards_before_one_backward_give_the_summed_gradient(
    offload: str, tiny: Any, batch: Any, grads: Grads, close: Any
) -> None:
    found = []
    for wrapped in (False, True):
        model = tiny("qwen2")
        if wrapped:
            fluxtrain.wrap(model, offload=offload, chunk_rows=3)
        first, second = model(**batch(seed=1)).loss, model(**batch(seed=2, rows=3)).loss
        (first + 2 * second).backward()
        found.append(grads(model))
    close(found[0], found[1], 1e-5)
