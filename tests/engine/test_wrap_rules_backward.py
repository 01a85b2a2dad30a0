"""Backward passes of a wrapped model: what is refused, what is exact, what survives an error."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fluxtrain
from fluxtrain.core.head.lazy_logits import LazyLogits
from fluxtrain.core.wrap.engine import engine_of
from fluxtrain.errors import Diverged, MisusedModel

Grads = Callable[[nn.Module], dict[str, Tensor]]


def test_partial_backward_passes_are_refused(tiny: Any, batch: Any, grads: Grads) -> None:
    model = fluxtrain.wrap(tiny("llama"))
    weights = list(model.parameters())
    for options in ({}, {"allow_unused": True}):  # they get theirs from us
        with pytest.raises(MisusedModel, match=r"do not reach .*read \.grad"):
            torch.autograd.grad(model(**batch()).loss, weights, **options)
    with pytest.raises(MisusedModel, match=r"do not reach lm_head.weight"):
        model(**batch()).loss.backward(inputs=[model.lm_head.weight])
    penalty = model.lm_head.weight.square().sum()
    with pytest.raises(MisusedModel, match=r"do not reach lm_head.weight"):
        torch.autograd.grad(model(**batch()).loss + penalty, model.lm_head.weight)
    with pytest.raises(MisusedModel, match="use loss.backward"):
        embedded = model.get_input_embeddings()(batch()["input_ids"]).detach().requires_grad_()
        loss = model(inputs_embeds=embedded, labels=batch()["labels"]).loss
        loss.backward(inputs=[embedded])
    assert not grads(model)


def test_changes_between_forward_and_backward_are_refused(tiny: Any, batch: Any) -> None:
    def step(model: nn.Module) -> None:
        torch.optim.AdamW(model.parameters(), lr=0.1).step()

    def write(model: nn.Module) -> None:
        with torch.no_grad():
            model.model.layers[1].mlp.up_proj.weight.mul_(2)
        model(**batch())  # the write is noticed at the next forward

    for change in (step, write):
        model = fluxtrain.wrap(tiny("llama"))
        model(**batch()).loss.backward()
        loss = model(**batch()).loss
        change(model)
        with pytest.raises(MisusedModel, match="changed between forward and backward"):
            loss.backward()


def test_switching_modes_or_adapters_between_forward_and_backward_is_refused(
    tiny: Any, batch: Any
) -> None:
    model = fluxtrain.wrap(tiny("llama"))
    loss = model(**batch()).loss
    model.eval()
    with pytest.raises(MisusedModel, match="switched between train and eval"):
        loss.backward()
    model.train()

    class Switched(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.base, self.extra, self.on = nn.Linear(8, 8), nn.Linear(8, 8), True

        def forward(self, x: Tensor) -> Tensor:
            return self.base(x) + (self.extra(x) if self.on else 0)

    class Adapted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(Switched() for _ in range(2))

        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                x = block(x)
            return x

    adapted = fluxtrain.wrap(Adapted())
    loss = adapted(torch.randn(3, 8)).sum()
    adapted.blocks[0].on = False
    with pytest.raises(MisusedModel, match="computed something else"):
        loss.backward()


@pytest.mark.parametrize("offload", ["none", "weights", "max"])
@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_an_error_inside_backward_leaves_nothing_behind(
    family: str, offload: str, tiny: Any, batch: Any, grads: Grads, same: Any
) -> None:
    """Half of the gradients had arrived; after zero_grad the next step is that of a fresh model."""
    model = fluxtrain.wrap(tiny(family), offload=offload, chunk_rows=2)
    fresh = fluxtrain.wrap(tiny(family), offload=offload, chunk_rows=2)

    class Interrupting(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            raise KeyboardInterrupt

    layer = model.model.layers[1]
    handle = layer.register_forward_hook(lambda _, args, out: Interrupting.apply(out))
    with pytest.raises(KeyboardInterrupt):
        model(**batch(family, seed=1)).loss.backward()
    handle.remove()
    model.zero_grad()
    assert not grads(model)
    for each in (model, fresh):
        each(**batch(family, seed=2)).loss.backward()
    same(grads(model), grads(fresh))
    assert engine_of(model).memory().device_by["activations"] == 0


def test_a_norm_that_is_not_finite_stops_the_step_and_spares_the_weights(
    tiny: Any, batch: Any, weights: Any, same: Any
) -> None:
    model = fluxtrain.wrap(tiny("llama"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    before = weights(model)
    model(**batch()).loss.mul(float("nan")).backward()
    engine_of(model).clip_grad_norm(1.0)
    with pytest.raises(Diverged, match="left as they were"):
        optimizer.step()
    optimizer.zero_grad()
    assert all(p.grad is None for p in model.parameters())
    same(weights(model), before)
    model(**batch()).loss.backward()
    optimizer.step()
    assert all(bool(p.detach().isfinite().all()) for p in model.parameters())


@pytest.mark.parametrize("offload", ["weights", "max"])
def test_a_second_backward_through_the_same_graph_doubles_the_gradient_or_is_refused(
    offload: str, tiny: Any, batch: Any, grads: Grads, close: Any
) -> None:
    found = []
    for wrapped in (False, True):
        model = tiny("llama")
        if wrapped:
            fluxtrain.wrap(model, offload=offload)
        loss = (model(**batch()).logits + 0).square().mean()
        loss.backward(retain_graph=True)
        loss.backward()
        found.append(grads(model))
    close(found[0], found[1], 1e-5)
    fused = model(**batch()).loss
    fused.backward(retain_graph=True)
    with pytest.raises((MisusedModel, RuntimeError), match="second backward pass"):
        fused.backward()


def test_hooks_after_accumulation_see_each_gradient_once_a_backward(tiny: Any, batch: Any) -> None:
    model = tiny("qwen2")
    seen: list[str] = []
    names = {id(p): n for n, p in model.named_parameters()}

    def early(p: Tensor) -> None:
        assert p.grad is not None
        seen.append(names[id(p)])

    some = [model.model.embed_tokens.weight, model.model.layers[0].mlp.up_proj.weight]
    some[0].register_post_accumulate_grad_hook(early)
    fluxtrain.wrap(model, chunk_rows=1)
    some[1].register_post_accumulate_grad_hook(early)
    for count in (1, 2):
        model(**batch()).loss.backward()
        assert sorted(seen) == sorted([names[id(p)] for p in some] * count)


def test_the_users_gradient_checkpointing_is_switched_off_and_says_so_once(
    tiny: Any, batch: Any, grads: Grads, same: Any, caplog: Any
) -> None:
    found = []
    for checkpointed in (False, True):
        model = fluxtrain.wrap(tiny("llama"))
        if checkpointed:
            model.gradient_checkpointing_enable()
        for _ in range(2):
            model.zero_grad()
            model(**batch()).loss.backward()
        found.append(grads(model))
    same(found[0], found[1])
    assert caplog.text.count("gradient checkpointing is off") == 1


def test_weights_used_outside_their_block_get_both_gradients(
    tiny: Any, batch: Any, grads: Grads, close: Any
) -> None:
    """A penalty on weights and a loss through the blocks, in one backward pass."""
    found = []
    for wrapped in (False, True):
        model = tiny("qwen2")
        if wrapped:
            fluxtrain.wrap(model)
        penalty = sum(p.square().sum() for p in model.parameters())
        (model(**batch()).loss + 0.1 * penalty).backward()
        found.append(grads(model))
    close(found[0], found[1], 1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_clipped_gradient_is_clipped_for_every_reader(
    dtype: torch.dtype, tiny: Any, batch: Any, grads: Grads
) -> None:
    """clip_grad_norm_ only records a factor; whoever looks must see it applied."""
    readers: dict[str, Callable[[nn.Parameter, Tensor], Tensor]] = {
        "copy": lambda p, g: g.clone(),
        "keyword": lambda p, g: torch.mul(input=g, other=1),
        "with its weight": lambda p, g: torch.lerp(p, g, 1.0).detach(),
        "in place": lambda p, g: p.detach().clone().zero_().add_(g),
        "numpy": lambda p, g: torch.tensor(g.float().numpy()),
        "copy_": lambda p, g: torch.empty_like(p).detach().copy_(g),
        "deepcopy": lambda p, g: copy.deepcopy(g),
    }
    for name, read in readers.items():
        model = fluxtrain.wrap(tiny("llama", dtype))
        model(**batch()).loss.backward()
        whole = model.lm_head.weight.grad.detach().clone()
        norm = float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-2))
        got = read(model.lm_head.weight, model.lm_head.weight.grad)
        expected = (whole.float() * (1e-2 / norm)).to(dtype)
        off = float((got.float() - expected.float()).norm()) / float(expected.float().norm())
        assert off < 2e-2, name


def test_logits_are_computed_when_read_and_not_before(tiny: Any, batch: Any) -> None:
    plain, model = tiny("llama"), fluxtrain.wrap(tiny("llama"))
    out, expected = model(**batch()), plain(**batch()).logits
    assert isinstance(out.logits, LazyLogits) and out.logits._real is None
    assert out.logits.shape == expected.shape and out.logits.dtype == expected.dtype
    assert torch.equal(out.logits[:, -1].argmax(-1), expected[:, -1].argmax(-1))
    assert torch.equal(out.logits.detach().softmax(-1), expected.softmax(-1))
    out.loss.backward()
    late = model(**batch())
    torch.optim.AdamW(model.parameters()).step()
    with pytest.raises(MisusedModel, match="before optimizer.step"):
        late.logits.sum()


@pytest.mark.parametrize(
    "norm",
    [
        lambda g: g.norm(),
        lambda g: g.norm(2),
        lambda g: torch.norm(g, p=2),
        torch.linalg.norm,
        lambda g: torch.linalg.norm(g, 2),  # of a matrix: its largest singular value
        lambda g: torch.linalg.norm(g, ord="fro"),
        lambda g: torch.linalg.vector_norm(g, 2),
        lambda g: torch.linalg.vector_norm(x=g),
        lambda g: torch.linalg.vector_norm(g, 1),
    ],
)
def test_a_norm_of_a_gradient_is_the_one_that_was_asked_for(
    tiny: Any, batch: Any, norm: Callable[[Tensor], Tensor]
) -> None:
    model = fluxtrain.wrap(tiny("llama"))
    model(**batch()).loss.backward()
    gradient = next(p.grad for p in model.parameters() if p.grad is not None and p.dim() == 2)
    torch.testing.assert_close(norm(gradient), norm(gradient.clone()))
