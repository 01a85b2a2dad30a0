"""Steps in backward need memory for a few groups' gradients on the host, not for every group's."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

import fluxtrain
from fluxtrain.core.memory.group import Group
from fluxtrain.core.wrap.engine import Engine, engine_of
from fluxtrain.core.wrap.grouping import facts_of
from fluxtrain.errors import DoesNotFit, MisusedModel
from fluxtrain.plan.depths import ring_depth
from fluxtrain.plan.facts import Capacity
from fluxtrain.plan.footprint import Layout, footprint
from fluxtrain.plan.states import StateFormat
from tests.wrap_with import wrap_with

LAYERS = 8
CONFIG = LlamaConfig(
    vocab_size=256, hidden_size=64, intermediate_size=96, num_hidden_layers=LAYERS,
    num_attention_heads=4, num_key_value_heads=2,
)  # fmt: skip


def wrapped(states: StateFormat = "fp32") -> tuple[nn.Module, Engine, torch.optim.AdamW]:
    torch.manual_seed(0)
    model = LlamaForCausalLM(CONFIG).to(torch.bfloat16)
    fluxtrain.wrap(model, device="cpu", offload="weights", overlap=True, states=states)
    return model, engine_of(model), torch.optim.AdamW(model.parameters(), lr=1e-2)


def step(model: nn.Module, optimizer: torch.optim.AdamW, seed: int, *, in_backward: bool) -> float:
    torch.manual_seed(seed)
    ids = torch.randint(0, 256, (2, 16))
    loss = model(input_ids=ids, labels=ids).loss
    if in_backward:
        engine_of(model).begin_step_in_backward(optimizer)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return float(loss.detach())


def held(engine: Engine) -> list[Group]:
    return [g for g in engine.groups if g.kind == "block" and g.memory.holds_gradients]


@pytest.mark.parametrize("states", ["fp32", "8bit"])
def test_a_few_blocks_hold_gradients_and_the_plan_knows(states: StateFormat) -> None:
    model, engine, optimizer = wrapped(states)
    for seed in range(4):
        step(model, optimizer, seed, in_backward=True)
        assert len(held(engine)) == ring_depth(1) < LAYERS
    engine.flush()
    facts = facts_of(LlamaForCausalLM(CONFIG).to(torch.bfloat16), states)  # type: ignore[arg-type]
    layout = Layout(offload="weights", optimizer_in_backward=True)
    predicted = footprint(facts, layout, has_gpu=True).arena_bytes
    assert engine.memory().host_arena_bytes == predicted
    block = next(g for g in facts.groups if g.kind == "block").rounded_bytes
    exact = footprint(facts, Layout(offload="weights"), has_gpu=True).arena_bytes
    assert exact - predicted >= (LAYERS - ring_depth(1)) * block


def test_a_host_with_room_for_the_ring_alone_runs_steps_in_backward_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    facts = facts_of(LlamaForCausalLM(CONFIG).to(torch.bfloat16))
    ring, every = (
        footprint(
            facts, Layout(offload="weights", optimizer_in_backward=in_backward), has_gpu=False
        ).host_bytes
        for in_backward in (True, False)
    )
    room = Capacity(device_free_bytes=None, host_available_bytes=(ring + every) // 2)
    monkeypatch.setattr("fluxtrain.core.wrap.target.free_capacity", lambda *_: room)
    wrap_with(
        LlamaForCausalLM(CONFIG).to(torch.bfloat16),
        device="cpu",
        offload="weights",
        optimizer_in_backward=True,
    )
    with pytest.raises(DoesNotFit, match="host memory"):
        fluxtrain.wrap(LlamaForCausalLM(CONFIG).to(torch.bfloat16), device="cpu", offload="weights")


def test_in_backward_and_exact_steps_may_take_turns() -> None:
    losses = []
    for pattern in ((False,) * 8, (True, True, False, True, False, False, True, True)):
        model, engine, optimizer = wrapped()
        losses.append([step(model, optimizer, i, in_backward=e) for i, e in enumerate(pattern)])
        engine.flush()
        losses[-1] += [float(p.detach().float().sum()) for p in model.parameters()]
    assert losses[0] == losses[1]


def test_a_gradient_that_was_used_up_is_not_shown() -> None:
    model, engine, optimizer = wrapped()
    ids = torch.randint(0, 256, (2, 16))
    loss = model(input_ids=ids, labels=ids).loss
    engine.begin_step_in_backward(optimizer)
    loss.backward()
    with pytest.raises(MisusedModel, match="was used up"):
        _ = model.model.layers[LAYERS - 1].mlp.up_proj.weight.grad
    optimizer.step()


@pytest.mark.parametrize("in_backward", [False, True])
def test_freed_gradients_leave_no_memory_and_are_taken_again(*, in_backward: bool) -> None:
    found = []
    for frees in (False, True):
        model, engine, optimizer = wrapped()
        losses = [step(model, optimizer, 1, in_backward=in_backward)]
        if frees:
            before = engine.memory().host_arena_bytes
            engine.free_gradients()
            assert not any(group.has_gradient for group in engine.groups)
            assert not any(group.memory.holds_gradients for group in engine.groups)
            assert engine.memory().host_arena_bytes < before
        losses.append(step(model, optimizer, 2, in_backward=in_backward))
        engine.flush()
        found.append(losses)
    assert found[0] == found[1]
