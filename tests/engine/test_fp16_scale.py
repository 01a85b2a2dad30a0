"""The loss scale of fp16: overflows, its growth, small and large gradients, and users' scalers."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fluxtrain
from fluxtrain.core.updates.loss_scale import BACKOFF, FIRST
from fluxtrain.core.wrap.engine import engine_of
from fluxtrain.errors import Diverged
from tests.engine.half_models import (
    HALF,
    HOMES,
    MAX_NORM,
    RATE,
    TOO_LARGE,
    adamw,
    masters,
    members,
    state,
    step,
)


@HOMES
def test_an_overflow_leaves_everything_as_it_was_and_halves_the_scale(
    half: Any, batch: Any, same: Any, offload: str
) -> None:
    model, engine = half(offload=offload, overlap=True)
    optimizer = adamw(model)
    step(model, optimizer, batch(seed=0))
    before = state(model)
    engine.loss_scale.load_state_dict({"scale": TOO_LARGE, "good_steps": 7})
    loss, norm = step(model, optimizer, batch(seed=1))
    assert loss > 0
    assert not math.isfinite(norm)
    same(before, state(model))
    assert engine.loss_scale.state_dict() == {"scale": TOO_LARGE * BACKOFF, "good_steps": 0}


def test_training_goes_on_after_overflows_as_if_they_had_not_been(
    half: Any, batch: Any, same: Any
) -> None:
    """The count of steps for the bias correction too, although the next step is queued before
    anybody has read how the last one went."""
    found = []
    for wasted in (0, 5):
        model, engine = half(overlap=True, device_groups=2, offload="weights")
        optimizer = adamw(model)
        step(model, optimizer, batch(seed=0))
        engine.loss_scale.load_state_dict({"scale": FIRST * 2.0**wasted, "good_steps": 0})
        if wasted:
            spoilt = next(m for g, m in members(engine) if g.kind == "block")
            for _ in range(wasted):
                loss = model(**batch(seed=1)).loss
                engine.loss_scale.of(loss).backward()
                spoilt.parameter.grad.fill_(float("inf"))
                engine.clip_grad_norm(MAX_NORM, [loss])
                optimizer.step()
                optimizer.zero_grad()
        assert float(engine.loss_scale.value) == FIRST
        for number in range(1, 4):
            step(model, optimizer, batch(seed=number))
        found.append(state(model))
        counts = {entry["step"] for entry in optimizer.state_dict()["state"]["fluxtrain"].values()}
        assert counts == {4}
    same(found[0], found[1])


def test_the_scale_doubles_after_enough_steps_without_an_overflow(half: Any, batch: Any) -> None:
    model, engine = half(scale=2.0**10, interval=3)
    optimizer = adamw(model)
    seen = []
    for number in range(7):
        seen.append(float(engine.loss_scale.value))
        step(model, optimizer, batch(seed=number))
    assert seen == [2.0**10] * 3 + [2.0**11] * 3 + [2.0**12]


def test_a_loss_that_is_not_finite_is_no_overflow(half: Any, batch: Any) -> None:
    """No scale cures it: the update says so, as in other precisions."""
    model, engine = half()
    optimizer = adamw(model)
    loss = model(**batch()).loss
    engine.loss_scale.of(loss).backward()
    norm = engine.clip_grad_norm(None, [loss * float("nan")])
    assert not norm.overflowed()
    with pytest.raises(Diverged):
        optimizer.step()


def test_several_backward_passes_add_up_beyond_the_range_of_fp16(half: Any, batch: Any) -> None:
    model, engine = half(offload="weights")
    loss = engine.loss_scale.of(model(**batch()).loss)
    loss.backward()
    once = engine.clip_grad_norm(None).value()
    largest = max(float(m.parameter.grad.abs().max()) for _, m in members(engine))
    model.zero_grad()
    passes = int(65504 / largest) + 2
    for _ in range(passes):
        engine.loss_scale.of(model(**batch()).loss).backward()
    assert engine.clip_grad_norm(None).value() == pytest.approx(passes * once, rel=1e-3)


def test_small_probabilities_at_the_head_keep_their_gradients(tiny: Any, batch: Any) -> None:
    """The mean over a batch makes slopes of 1e-8 and less, which fp16 does not know: the head keeps
    them larger until they meet the loss scale."""
    found = []
    for dtype in (HALF, torch.float32):
        model = fluxtrain.wrap(tiny("llama", HALF).to(dtype), chunk_rows=2)
        loss = model(**batch(rows=16, length=32)).loss
        (loss * FIRST).backward()
        found.append(model.lm_head.weight.grad.float() / FIRST)
    error = (found[0] - found[1]).norm() / found[1].norm()
    assert float(error) < 2e-3


# -- other loops than the trainer's ----------------------------------------------------------------


def scaled_step(
    model: nn.Module, optimizer: Any, scaler: Any, inputs: dict[str, Tensor], *, clip: bool = True
) -> float:
    """The loop of torch's documentation."""
    loss = model(**inputs).loss
    scaler.scale(loss).backward()
    if clip:
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    return float(loss.detach())


def test_a_users_loop_with_a_grad_scaler_trains_as_the_engine_does(
    half: Any, tiny: Any, batch: Any
) -> None:
    model, engine = half()
    optimizer = adamw(model)
    theirs = fluxtrain.wrap(tiny("llama", HALF))
    their_optimizer, scaler = adamw(theirs), fluxtrain.GradScaler("cpu")
    for number in range(6):
        loss, _ = step(model, optimizer, batch(seed=number))
        their_loss = scaled_step(theirs, their_optimizer, scaler, batch(seed=number))
        assert their_loss == pytest.approx(loss, rel=1e-4)
    for name, master in masters(engine_of(theirs)).items():
        assert torch.allclose(master, masters(engine)[name], atol=2e-4)


@pytest.mark.parametrize("clip", [True, False])
def test_a_grad_scaler_skips_a_step_that_overflowed(
    clip: bool, tiny: Any, batch: Any, same: Any
) -> None:
    model = fluxtrain.wrap(tiny("llama", HALF))
    optimizer, scaler = adamw(model), fluxtrain.GradScaler("cpu", init_scale=TOO_LARGE)
    before = state(model)
    scaled_step(model, optimizer, scaler, batch(), clip=clip)
    same(before, state(model))
    assert scaler.get_scale() == TOO_LARGE / 2
    scaler.update(FIRST)
    scaled_step(model, optimizer, scaler, batch(), clip=clip)
    after = state(model)
    assert any(not torch.equal(before[name], after[name]) for name in before)


def test_torchs_own_scaler_works_with_a_fused_adamw(tiny: Any, batch: Any) -> None:
    """Which is handed the scale: the way of torch for optimizers that unscale by themselves."""
    found = []
    for fused in (True, False):
        model = fluxtrain.wrap(tiny("llama", HALF))
        optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, fused=fused)
        scaler = torch.amp.GradScaler("cpu") if fused else fluxtrain.GradScaler("cpu")
        for number in range(3):
            scaled_step(model, optimizer, scaler, batch(seed=number), clip=False)
        found.append(masters(engine_of(model)))
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])


# -- what is refused, and what it takes ------------------------------------------------------------
