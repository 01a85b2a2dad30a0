"""What goes into a wrapped block: caches, frozen inputs, odd shapes, buffers, captured tensors."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import DynamicCache

import fluxtrain
from fluxtrain.errors import MisusedModel, UnsupportedModel
from tests.wrap_with import wrap_with

Grads = Callable[[nn.Module], dict[str, Tensor]]


class Stack(nn.Module):
    """Blocks in a row; `block()` makes one."""

    def __init__(self, block: Callable[[], nn.Module], count: int = 3) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(block() for _ in range(count))

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        for block in self.blocks:
            x = block(x, *args, **kwargs)
        return x


def pair(block: Callable[[], nn.Module], **options: Any) -> tuple[nn.Module, nn.Module]:
    """The same stack plain and wrapped."""
    torch.manual_seed(0)
    plain = Stack(block)
    return plain, wrap_with(copy.deepcopy(plain), **options)


# -- caches ----------------------------------------------------------------------------------------


def test_a_cache_made_by_default_does_not_change_gradients(
    tiny: Any, batch: Any, grads: Grads, close: Any
) -> None:
    found = []
    for wrapped in (False, True):
        model = tiny("llama")
        assert model.config.use_cache
        if wrapped:
            fluxtrain.wrap(model)
        model(**batch(), use_cache=True).loss.backward()
        found.append(grads(model))
    close(found[0], found[1], 1e-5)


def test_a_filled_cache_is_refused_with_gradients_and_works_without(tiny: Any, batch: Any) -> None:
    plain, wrapped = tiny("llama").eval(), fluxtrain.wrap(tiny("llama").eval())
    ids = batch()["input_ids"]
    answers = []
    for model in (plain, wrapped):
        cache = DynamicCache(config=model.config)
        with torch.no_grad():
            model(input_ids=ids[:, :6], past_key_values=cache)
            assert cache.get_seq_length() == 6
            answers.append(model(input_ids=ids[:, 6:8], past_key_values=cache).logits)
        assert cache.get_seq_length() == 8
    assert torch.equal(*answers)
    with pytest.raises(MisusedModel, match="already holds 8 positions"):
        wrapped(input_ids=ids[:, 8:], past_key_values=cache)


def test_opaque_arguments_that_hold_gradients_are_refused() -> None:
    @dataclass
    class Extra:
        bias: Tensor

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: Tensor, extra: Extra) -> Tensor:
            return self.linear(x) + extra.bias

    _, wrapped = pair(Block)
    wrapped(torch.ones(2, 4), Extra(torch.ones(4))).sum().backward()
    with pytest.raises(MisusedModel, match="Extra that holds tensors with gradients"):
        wrapped(torch.ones(2, 4), Extra(torch.ones(4, requires_grad=True)))


# -- frozen parts ----------------------------------------------------------------------------------


@pytest.mark.parametrize("trained", ["all but the embedding", "one adapter", "the embedding"])
def test_frozen_parts_get_no_gradient_and_the_others_get_theirs(
    trained: str, tiny: Any, batch: Any, grads: Grads, close: Any
) -> None:
    def wanted(name: str) -> bool:
        return {
            "all but the embedding": "embed_tokens" not in name,
            "one adapter": name == "model.layers.1.self_attn.q_proj.weight",
            "the embedding": "embed_tokens" in name,
        }[trained]

    found = []
    for wrapped in (False, True):
        model = tiny("llama")
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(wanted(name))
        if wrapped:
            fluxtrain.wrap(model, chunk_rows=3)
            frozen = {n: p.detach().clone() for n, p in model.named_parameters() if not wanted(n)}
        model(**batch()).loss.backward()
        found.append(grads(model))
    assert found[1]
    close(found[0], found[1], 1e-5)
    torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.1).step()
    now = dict(model.named_parameters())
    assert all(torch.equal(now[n].detach(), frozen[n]) for n in frozen)


def test_freezing_after_wrap_works_and_thawing_is_refused(tiny: Any, batch: Any) -> None:
    model = tiny("llama")
    model.model.layers[0].requires_grad_(False)
    fluxtrain.wrap(model)
    model.model.layers[1].requires_grad_(False)
    model(**batch()).loss.backward()
    assert all(p.grad is None for p in model.model.layers[1].parameters())
    assert all(p.grad is not None for p in model.model.layers[2].parameters())
    model.model.layers[0].requires_grad_(True)
    with pytest.raises(MisusedModel, match="frozen when the model was wrapped"):
        model(**batch()).loss.backward()


# -- inputs of the whole model get gradients too --------------------------------------------------


def test_inputs_and_side_inputs_get_their_gradients() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x: Tensor, side: dict[str, Any]) -> Tensor:
            return self.linear(x) * side["scale"] + side["rows"][0]

    found = []
    for model in pair(Block, chunk_rows=2):
        torch.manual_seed(1)
        x, rows = (torch.randn(5, 8, requires_grad=True) for _ in range(2))
        scale = torch.randn(8, requires_grad=True)
        model(x, {"scale": scale, "rows": [rows], "name": "anything"}).square().sum().backward()
        found.append([x.grad, rows.grad, scale.grad])
    for a, b in zip(*found, strict=True):
        assert torch.allclose(a, b, rtol=1e-5, atol=1e-6)


# -- router logits ---------------------------------------------------------------------------------


@pytest.mark.parametrize("chunk_rows", [4, 1])
def test_the_auxiliary_loss_of_a_router_keeps_its_gradient(
    chunk_rows: int, tiny: Any, batch: Any, grads: Grads, close: Any
) -> None:
    """With and without it: the difference of the gates' gradients is the auxiliary loss's."""
    found: dict[str, dict[str, Tensor]] = {}
    for kind in ("plain", "wrapped", "without"):
        model = tiny("mixtral", router_aux_loss_coef=0.0 if kind == "without" else 0.5)
        if kind != "plain":
            fluxtrain.wrap(model, chunk_rows=chunk_rows)
        out = model(**batch("mixtral"))
        out.loss.backward()
        assert len(out.router_logits) == 3
        found[kind] = {n: g for n, g in grads(model).items() if "gate" in n}
    close(found["plain"], found["wrapped"], 1e-5)
    with pytest.raises(AssertionError):
        close(found["plain"], found["without"], 1e-2)


# -- what may be cut into chunks -------------------------------------------------------------------


def test_sequence_first_modules_are_not_cut(grads: Grads, close: Any, caplog: Any) -> None:
    plain, wrapped = pair(lambda: nn.TransformerEncoderLayer(16, 2, 32, 0.0), chunk_rows=2)
    x = torch.randn(6, 3, 16)  # (S, B, C)
    plain(x).square().mean().backward(), wrapped(x).square().mean().backward()
    close(grads(plain), grads(wrapped), 1e-5)
    assert "other results for chunks than for the whole batch" in caplog.text


def test_batch_norm_is_not_cut_and_its_statistics_count_each_batch_once(
    grads: Grads, close: Any
) -> None:
    plain, wrapped = pair(lambda: nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)), chunk_rows=2)
    for step in range(2):
        x = torch.randn(6, 8, generator=torch.Generator().manual_seed(step))
        plain.zero_grad(), wrapped.zero_grad()
        plain(x).square().mean().backward(), wrapped(x).square().mean().backward()
        close(grads(plain), grads(wrapped), 1e-4)
    close(dict(plain.named_buffers()), dict(wrapped.named_buffers()), 1e-6)
    wrapped.eval(), plain.eval()
    assert torch.allclose(plain(x), wrapped(x), atol=1e-6)


# -- autocast --------------------------------------------------------------------------------------


def test_autocast_gives_the_plain_results_and_keeps_no_copy_of_the_weights(
    grads: Grads, close: Any
) -> None:
    plain, wrapped = pair(lambda: nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16)))
    x = torch.randn(4, 16)
    losses = []
    for model in (plain, wrapped):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = model(x)
            assert y.dtype == torch.bfloat16
        loss = y.float().square().mean()
        loss.backward()
        losses.append(loss.detach())
    assert torch.equal(*losses)
    close(grads(plain), grads(wrapped), 1e-2)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        wrapped(x)
        with torch.no_grad():
            wrapped.blocks[0][0].weight.mul_(2.0)
        assert not torch.equal(wrapped(x), y)  # a cached cast would be of the old weight


# -- what cannot be wrapped ------------------------------------------------------------------------


def test_models_that_cannot_stream_are_refused_with_the_cure() -> None:
    def refuse(model: nn.Module, words: str) -> None:
        before = list(model.state_dict())
        with pytest.raises(UnsupportedModel, match=words):
            fluxtrain.wrap(model)
        assert list(model.state_dict()) == before
        assert all(type(p) is nn.Parameter for p in model.parameters())

    refuse(nn.Linear(4, 4), "no repeated blocks")
    refuse(nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)), "no repeated blocks")
    loose = Stack(lambda: nn.Linear(4, 4))
    loose.scale = nn.Parameter(torch.ones(1, dtype=torch.float16))
    refuse(loose, "float16.*bfloat16")
    with torch.device("meta"):
        empty = Stack(lambda: nn.Linear(4, 4))
    refuse(empty, "meta device")
