"""Steps in backward of graphs that need weights more than once: they equal exact ones, or say
so."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext, suppress
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

import fluxtrain
from fluxtrain.core.wrap.engine import engine_of
from fluxtrain.errors import Diverged, MisusedModel
from tests.engine.plain_models import Net, adamw
from tests.wrap_with import wrap_with

Loss = Callable[[nn.Module, int], Tensor]
Weights = dict[str, Tensor]


class Deep(Net):
    """More blocks than the ring has buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks.extend(type(self.blocks[0])() for _ in range(5))


def batch(step: int) -> Tensor:
    return torch.randn(8, 96, generator=torch.Generator().manual_seed(step))


def distance(out: Tensor, x: Tensor) -> Tensor:
    return (out - x.flip(1)).float().square().mean()


def plain(model: nn.Module, step: int) -> Tensor:
    x = batch(step)
    return distance(model(x), x)


def block_called_twice(model: nn.Module, step: int) -> Tensor:
    x = batch(step)
    return distance(model.blocks[1](model(x)), x)


def model_called_twice(model: nn.Module, step: int) -> Tensor:
    return plain(model, step) + plain(model, step + 100)


def penalty(model: nn.Module) -> Tensor:
    return 1e-2 * model.blocks[2].a.weight.float().square().sum()


def penalty_behind(model: nn.Module, step: int) -> Tensor:
    return plain(model, step) + penalty(model)


def penalty_before(model: nn.Module, step: int) -> Tensor:
    first = penalty(model)
    return first + plain(model, step)


def now_and_then(model: nn.Module, step: int) -> Tensor:
    """Groups keep their gradients in one step and hand the memory on in the next."""
    return (plain, block_called_twice, model_called_twice, plain, penalty_before)[step % 5](
        model, step
    )


def trained(loss_of: Loss, *, in_backward: bool, steps: int = 6, **options: Any) -> Weights:
    torch.manual_seed(3)
    dtype = options.pop("dtype", torch.float32)
    wrapping = {"offload": "weights", "overlap": True, **options}
    model = wrap_with(Deep().to(dtype), device="cpu", **wrapping)
    engine, optimizer = engine_of(model), adamw(model)
    for step in range(steps):
        loss = loss_of(model, step)
        if in_backward:
            engine.begin_step_in_backward(optimizer, loss)
        loss.backward()
        engine.clip_grad_norm(None, [loss.detach()])
        optimizer.step()
        optimizer.zero_grad()
    engine.flush()
    assert {m.step for g in engine.groups for m in g.members if "unused" not in m.name} == {steps}
    return {name: p.detach().clone() for name, p in model.named_parameters()}


@pytest.mark.parametrize("device_groups", [0, 2])
@pytest.mark.parametrize(
    "loss_of",
    [plain, block_called_twice, model_called_twice, penalty_behind, penalty_before, now_and_then],
)
@pytest.mark.thinned(5)
def test_steps_in_backward_equal_exact_ones_where_weights_are_needed_twice(
    loss_of: Loss, device_groups: int
) -> None:
    exact, in_backward = (
        trained(loss_of, in_backward=which, device_groups=device_groups) for which in (False, True)
    )
    assert [name for name in exact if not torch.equal(exact[name], in_backward[name])] == []


def small_llama(**options: Any) -> nn.Module:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=96,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=options.pop("tied"),
    )
    model = LlamaForCausalLM(config).to(torch.bfloat16)
    return wrap_with(model, device="cpu", offload="weights", overlap=True, **options)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("places", [{}, {"head": "chunks"}, {"embedding": "rows"}])
@pytest.mark.thinned(3)
def test_two_losses_over_one_head(tied: bool, places: dict[str, str]) -> None:
    found = []
    for in_backward in (False, True):
        model = small_llama(tied=tied, **places)
        engine, optimizer = engine_of(model), adamw(model)
        torch.manual_seed(1)
        kept = []
        for _ in range(4):
            ids = torch.randint(0, 96, (2, 16))
            one, two = model(input_ids=ids, labels=ids), model(input_ids=ids.flip(1))
            loss = one.loss + two.logits.float().logsumexp(-1).mean()
            if in_backward:
                engine.begin_step_in_backward(optimizer, loss)
            loss.backward()
            engine.clip_grad_norm(None)
            optimizer.step()
            optimizer.zero_grad()
            kept.append(float(loss.detach()))
        engine.flush()
        found.append((kept, [p.detach().clone() for p in model.parameters()]))
    assert found[0][0] == found[1][0]
    assert all(torch.equal(a, b) for a, b in zip(found[0][1], found[1][1], strict=True))


def test_a_second_backward_pass_in_a_step_in_backward_is_refused() -> None:
    model = fluxtrain.wrap(Deep(), device="cpu", offload="weights")
    engine, optimizer = engine_of(model), adamw(model)
    engine.begin_step_in_backward(optimizer)
    plain(model, 0).backward()
    with pytest.raises(MisusedModel, match=r"blocks\.7 got a gradient after its update"):
        plain(model, 1).backward()
    optimizer.step()  # of the first one
    engine.flush()
    assert {m.step for group in engine.groups for m in group.members if "unused" not in m.name} == {
        1
    }


@pytest.mark.parametrize("in_backward", [False, True])
@pytest.mark.parametrize("device_groups", [0, 2, 8])
def test_a_refused_step_counts_nowhere(device_groups: int, in_backward: bool) -> None:
    model = wrap_with(
        Deep(), device="cpu", offload="weights", overlap=True, device_groups=device_groups
    )
    engine, optimizer = engine_of(model), adamw(model)
    before = [p.detach().clone() for p in model.parameters()]
    loss = plain(model, 0) * torch.nan
    with pytest.raises(Diverged, match="the loss is nan") if device_groups < 8 else nullcontext():
        if in_backward:
            engine.begin_step_in_backward(optimizer, loss)
        loss.backward()
        engine.clip_grad_norm(None if in_backward else 1.0, [loss.detach()])
        optimizer.step()
        engine.flush()
    with suppress(Diverged):  # each group tells once
        engine.flush()
    assert {m.step for group in engine.groups for m in group.members} == {0}
    assert all(map(torch.equal, before, model.parameters()))
