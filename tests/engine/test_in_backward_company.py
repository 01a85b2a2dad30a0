"""Steps in backward beside other optimizers, threads, checkpoints, scalers and curious blocks."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import fluxtrain
from fluxtrain.errors import Diverged, MisusedModel
from fluxtrain.updates import updates
from fluxtrain.wrapping.engine import engine_of
from tests.engine.plain_models import adamw
from tests.engine.test_in_backward_faults import (
    data_of,
    detached,
    differing,
    in_halves,
    steps,
    weights,
    wrapped,
)
from tests.engine.test_in_backward_graphs import Deep, batch, distance, plain


@pytest.mark.parametrize("device_groups", [0, 8])
def test_reentrant_checkpointing_keeps_the_guard_of_the_loss(device_groups: int) -> None:
    model, engine = wrapped(device_groups=device_groups)
    optimizer, before = adamw(model), weights(model)
    hidden = batch(0).requires_grad_()
    for block in model.blocks:
        hidden = checkpoint(block, hidden, use_reentrant=True)
    loss = distance(hidden, batch(0)) * torch.nan
    with suppress(Diverged):
        engine.begin_step_in_backward(optimizer, loss)
        loss.backward()
        optimizer.step()
        engine.flush()
    engine.updates.forget_refused()
    assert differing(before, weights(model)) == []


class Looks(nn.Module):
    """Computes with a weight of another block, which gets no gradient by it."""

    def __init__(self, block: nn.Module, other: nn.Module, how: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.inner, self.how = block, how
        object.__setattr__(self, "other", other)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) + 0.1 * functional.linear(x, self.how(self.other.a.weight))


@pytest.mark.parametrize("how", [detached, data_of, lambda weight: weight.detach().clone()])
@pytest.mark.parametrize(("who", "whom"), [(6, 7), (0, 7), (3, 4)])
def test_a_block_that_looks_at_the_weight_of_another_one(
    how: Callable[[Tensor], Tensor], who: int, whom: int
) -> None:
    found = []
    for in_backward in (False, True):
        torch.manual_seed(3)
        model = Deep()
        model.blocks[1].unused = nn.Identity()
        model.blocks[who] = Looks(model.blocks[who], model.blocks[whom], how)
        fluxtrain.wrap(model, device="cpu", offload="weights", overlap=True)
        engine, optimizer = engine_of(model), adamw(model)
        for step in range(5):
            loss = plain(model, step)
            if in_backward:
                engine.begin_step_in_backward(optimizer, loss)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        found.append(weights(model))
    assert differing(*found) == []


@pytest.mark.parametrize("device_groups", [0, 8])
def test_an_optimizer_that_is_dropped_takes_its_in_backward_step_along(device_groups: int) -> None:
    model, engine = wrapped(device_groups=device_groups)
    optimizer = adamw(model)
    loss = plain(model, 0)
    engine.begin_step_in_backward(optimizer, loss)
    loss.backward()
    del optimizer
    gc.collect()
    optimizer = adamw(model)
    optimizer.step()
    optimizer.zero_grad()
    before = weights(model)
    optimizer.step()
    assert differing(before, weights(model)) == []
    loss = plain(model, 1)
    engine.begin_step_in_backward(optimizer, loss)
    loss.backward()
    optimizer.step()
    assert set(steps(engine)) == {1}


def test_a_look_from_another_thread_does_not_end_a_pass() -> None:
    model, engine = wrapped()
    optimizer, looked = adamw(model), []
    hidden = model(batch(0))

    def look_there() -> None:
        with pytest.raises(MisusedModel, match="was used up"):
            looked.append(model.blocks[7].a.weight.grad)
        looked.append(None)

    def look(_: Tensor) -> None:
        thread = threading.Thread(target=look_there)
        thread.start()
        thread.join()

    loss = distance(hidden, batch(0))
    model.blocks[3].b.weight.register_post_accumulate_grad_hook(look)
    engine.begin_step_in_backward(optimizer, loss)
    loss.backward()
    assert looked == [None]
    assert engine.step_in_backward is not None and len(engine.step_in_backward.updated) == 8
    optimizer.step()
    assert set(steps(engine)) == {1}


@pytest.mark.parametrize("order", ["ab", "ba"])
@pytest.mark.parametrize("begins", ["a", "b"])
def test_the_guard_of_the_loss_holds_for_both_optimizers(begins: str, order: str) -> None:
    model, engine = wrapped(device_groups=8)
    before = weights(model)
    optimizers = {
        name: torch.optim.AdamW(part) for name, part in zip("ab", in_halves(model), strict=True)
    }
    loss = plain(model, 0) * torch.nan
    engine.begin_step_in_backward(optimizers[begins], loss)
    loss.backward()
    for name in order:
        optimizers[name].step()
    assert differing(before, weights(model)) == []


def test_a_scaler_and_a_step_in_backward_are_refused_together() -> None:
    model, engine = wrapped(device_groups=8)
    optimizer = adamw(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=16.0)
    loss = plain(model, 0)
    engine.begin_step_in_backward(optimizer, loss)
    scaler.scale(loss).backward()
    with pytest.raises(MisusedModel, match="GradScaler"):
        scaler.step(optimizer)


def test_an_update_that_failed_is_told_of_beside_one_that_was_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, engine = wrapped()
    optimizer = adamw(model)
    loss = plain(model, 0) * torch.nan
    loss.backward()
    engine.clip_grad_norm(None, [loss.detach()])
    real = updates._Step.update

    def update(self: Any) -> None:
        if self.name == "blocks.5":
            raise MemoryError("no memory")
        real(self)

    monkeypatch.setattr(updates._Step, "update", update)
    optimizer.step()
    with pytest.raises(MemoryError):
        engine.updates.forget_refused()
