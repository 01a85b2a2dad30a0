"""fp16 weights with fp32 masters: whole steps, placements, homes, what is kept, what is refused."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
from torch import nn

from fluxtrain.core.adamw import reference
from fluxtrain.core.adamw.hyper import Hyper, coefficients
from fluxtrain.core.updates.loss_scale import FIRST
from fluxtrain.core.updates.norm import clip_scale
from fluxtrain.core.wrap.engine import engine_of
from fluxtrain.core.wrap.grouping import facts_of
from fluxtrain.errors import MisusedModel
from fluxtrain.plan import states as state_formats
from tests.engine.half_models import (
    HALF,
    HOMES,
    MAX_NORM,
    RATE,
    adamw,
    masters,
    members,
    state,
    step,
)


@HOMES
@pytest.mark.parametrize("states", ["fp32", "bf16", "8bit"])
@pytest.mark.thinned(5)
def test_fp16_steps_equal_the_oracle_on_fp32_masters(
    half: Any, batch: Any, offload: str, states: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bit for bit, from the scaled fp16 gradients; the weights are what the masters round to."""
    monkeypatch.setattr(state_formats, "LEAST_LOW_BIT", 100)
    model, engine = half(offload=offload, states=states, chunk_rows=2)
    optimizer = adamw(model)
    hyper = Hyper(RATE, (0.9, 0.999), 1e-8, 0.1)
    expected: dict[int, Any] = {}
    for number in range(1, 6):
        loss = model(**batch(seed=number)).loss
        engine.loss_scale.of(loss).backward()
        scaled = {id(m): m.parameter.grad.detach().clone() for _, m in members(engine)}
        assert all(g.dtype == HALF for g in scaled.values())
        norm = engine.clip_grad_norm(MAX_NORM, [loss]).value()
        exact = torch.cat([g.double().flatten() for g in scaled.values()]).norm().item() / FIRST
        assert norm == pytest.approx(exact, rel=1e-6)
        before = {id(m): m.parameter.detach().float().flatten() for _, m in members(engine)}
        optimizer.step()
        optimizer.zero_grad()
        c = coefficients(hyper, number, clip_scale(norm, MAX_NORM) / FIRST)
        for _, member in members(engine):
            if member.segment.format != "fp32":
                continue  # what those formats do to moments is tested elsewhere
            zero = torch.zeros_like(before[id(member)])
            master, m, v = expected.get(id(member), (before[id(member)], zero, zero))
            found = reference.adamw(master, m, v, scaled[id(member)].flatten(), c)
            expected[id(member)] = found
            assert torch.equal(member.states()["master"].flatten(), found[0])
    for _, member in members(engine):
        weights = member.parameter.detach()
        assert weights.dtype == HALF
        assert torch.equal(weights, member.states()["master"].half())


@pytest.mark.parametrize("family", ["llama", "qwen2", "gpt2"])
@pytest.mark.thinned(1)
def test_a_streamed_fp16_training_follows_the_plain_one(
    family: str, half: Any, tiny: Any, batch: Any
) -> None:
    """Plain torch with fp32 masters and the same scale: losses to half a thousandth over 12 steps,
    in which they fall."""
    plain = tiny(family, HALF)
    theirs = [nn.Parameter(p.detach().float()) for p in plain.parameters()]
    reference_optimizer = torch.optim.AdamW(theirs, lr=RATE, weight_decay=0.1)
    model, engine = half(family, chunk_rows=2, overlap=True)
    optimizer = adamw(model)
    ours_losses, their_losses = [], []
    for number in range(12):
        inputs = batch(family, seed=number % 2)
        loss = plain(**inputs).loss
        (loss * FIRST).backward()
        for master, p in zip(theirs, plain.parameters(), strict=True):
            assert p.grad is not None
            master.grad, p.grad = p.grad.float() / FIRST, None
        torch.nn.utils.clip_grad_norm_(theirs, MAX_NORM)
        reference_optimizer.step()
        with torch.no_grad():
            for master, p in zip(theirs, plain.parameters(), strict=True):
                p.copy_(master)
        their_losses.append(float(loss.detach()))
        ours_losses.append(step(model, optimizer, inputs)[0])
    assert ours_losses == pytest.approx(their_losses, rel=5e-4)
    assert ours_losses[-1] < ours_losses[0] - 0.1
    assert float(engine.loss_scale.value) == FIRST


def test_a_weight_that_is_written_from_outside_is_its_own_master(half: Any, batch: Any) -> None:
    model, engine = half()
    optimizer = adamw(model)
    step(model, optimizer, batch(seed=0))
    member = engine.groups[1].members[0]
    with torch.no_grad():
        member.parameter.zero_()
    step(model, optimizer, batch(seed=1))
    engine.flush()
    assert float(member.parameter.detach().abs().max()) <= 1.01 * RATE
    assert float(member.states()["master"].abs().max()) <= 1.01 * RATE


def test_a_saved_and_restored_fp16_training_goes_on_bit_for_bit(
    half: Any, batch: Any, same: Any
) -> None:
    """Through state_dict and torch.save, and through shards; the masters' lower bits too."""
    model, _ = half("qwen2", overlap=True)
    optimizer = adamw(model)
    for number in range(3):
        step(model, optimizer, batch("qwen2", seed=number))
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    file.seek(0)
    saved, shards = torch.load(file), list(engine_of(model).state_shards())
    shards = [(name, {k: t.clone() for k, t in tensors.items()}) for name, tensors in shards]
    by_torch, _ = half("qwen2")
    by_torch.load_state_dict(saved["model"])
    again = adamw(by_torch)
    again.load_state_dict(saved["optimizer"])
    by_shards, engine = half("qwen2", offload="none")
    for name, tensors in shards:
        engine.load_state_shard(name, tensors)
    third = adamw(by_shards)
    for number in range(3, 5):
        inputs = batch("qwen2", seed=number)
        for one, its in ((model, optimizer), (by_torch, again), (by_shards, third)):
            step(one, its, inputs)
    same(state(model), state(by_torch))
    same(state(model), state(by_shards))
    assert any(bool((m != m.half().float()).any()) for m in masters(engine_of(model)).values())


def test_a_group_cannot_be_updated_before_the_overflow_is_known(half: Any) -> None:
    model, engine = half()
    with pytest.raises(MisusedModel, match="loss scale"):
        engine.begin_step_in_backward(adamw(model))


@pytest.mark.parametrize("states", ["fp32", "bf16", "8bit"])
def test_predicted_bytes_of_fp16_are_those_that_are_allocated(
    states: Any, half: Any, tiny: Any, batch: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(state_formats, "LEAST_LOW_BIT", 100)
    facts = facts_of(tiny("qwen2", HALF), states)
    model, engine = half("qwen2", offload="weights", states=states)
    optimizer = adamw(model)
    for _ in range(2):
        engine.loss_scale.of(model(**batch("qwen2")).loss).backward()
    engine.clip_grad_norm(None)
    optimizer.step()
    engine.flush()
    assert facts.scales_its_loss
    for group, predicted in zip(engine.groups, facts.groups, strict=True):
        assert group.weight_bytes == predicted.weight_bytes
        assert group.state_bytes == pytest.approx(predicted.state_bytes, abs=4096)
        held = predicted.gradient_bytes(accumulates=True)
        assert group.gradient_bytes == pytest.approx(held, abs=4096)
