"""Steps in backward that are given up, refused or used in odd ways, and beside other optimizers,
threads, scalers and blocks that look at weights of others."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from fluxtrain.core.wrap.engine import Engine, engine_of
from fluxtrain.errors import Diverged, MisusedModel
from tests.engine.plain_models import adamw
from tests.engine.test_in_backward_graphs import Deep, batch, distance, plain
from tests.wrap_with import wrap_with

Weights = dict[str, Tensor]


def wrapped(**options: Any) -> tuple[Deep, Engine]:
    torch.manual_seed(3)
    model = Deep()
    model.blocks[1].unused = nn.Identity()
    wrap_with(model, device="cpu", **{"offload": "weights", "overlap": True, **options})
    return model, engine_of(model)


def weights(model: nn.Module) -> Weights:
    engine_of(model).flush()
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def steps(engine: Engine) -> list[int]:
    return [member.step for group in engine.groups for member in group.members]


def differing(one: Weights, other: Weights) -> list[str]:
    return [name for name, values in one.items() if not torch.equal(values, other[name])]


def detached(weight: Tensor) -> Tensor:
    return weight.detach()


def data_of(weight: Tensor) -> Tensor:
    return weight.data


def a_view_without_gradients(weight: Tensor) -> Tensor:
    with torch.no_grad():
        return weight.view(96, 96)


@pytest.mark.parametrize("alias", [detached, data_of, a_view_without_gradients])
@pytest.mark.parametrize("device_groups", [0, 8])
def test_a_weight_that_is_used_outside_without_gradients(
    alias: Callable[[Tensor], Tensor], device_groups: int
) -> None:
    found = []
    for in_backward in (False, True):
        model, engine = wrapped(device_groups=device_groups)
        optimizer = adamw(model)
        for step in range(3):
            x = batch(step)
            hidden = model.blocks[0](x)
            hidden = hidden + functional.linear(hidden, alias(model.blocks[7].a.weight))
            for block in model.blocks[1:]:
                hidden = block(hidden)
            loss = distance(hidden, x)
            if in_backward:
                engine.begin_step_in_backward(optimizer, loss)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        found.append(weights(model))
    assert differing(*found) == []


def in_halves(model: Deep) -> list[list[nn.Parameter]]:
    return [list(model.blocks[:4].parameters()), list(model.blocks[4:].parameters())]


def by_kind(model: Deep) -> list[list[nn.Parameter]]:
    return [[p for p in model.parameters() if p.dim() == d] for d in (1, 2)]


@pytest.mark.parametrize("split", [in_halves, by_kind])
@pytest.mark.parametrize("device_groups", [0, 8])
@pytest.mark.parametrize(
    ("begins", "order"), [("a", "ab"), ("a", "ba"), ("ab", "ab"), ("ab", "ba")]
)
@pytest.mark.thinned(6)
def test_two_optimizers_over_one_model(
    split: Callable[[Deep], list[list[nn.Parameter]]], device_groups: int, begins: str, order: str
) -> None:
    found = []
    for in_backward in (False, True):
        model, engine = wrapped(device_groups=device_groups)
        optimizers = {
            name: torch.optim.AdamW(part, lr=1e-3)
            for name, part in zip("ab", split(model), strict=True)
        }
        for step in range(3):
            loss = plain(model, step)
            for name in begins if in_backward else "":
                engine.begin_step_in_backward(optimizers[name], loss)
            loss.backward()
            for name in order:
                optimizers[name].step()
            for optimizer in optimizers.values():
                optimizer.zero_grad()
        found.append(weights(model))
        assert set(steps(engine)) == {3}
    assert differing(*found) == []


def test_an_optimizer_that_is_not_taken_over_has_no_step_in_backward() -> None:
    model, engine = wrapped()
    with pytest.raises(MisusedModel, match="SGD"):
        engine.begin_step_in_backward(torch.optim.SGD(model.parameters(), lr=0.1))


def test_a_second_in_backward_step_before_the_end_of_the_first_is_refused() -> None:
    model, engine = wrapped(device_groups=8)
    optimizer = adamw(model)
    loss = plain(model, 0)
    engine.begin_step_in_backward(optimizer, loss)
    loss.backward()
    loss = plain(model, 1)
    with pytest.raises(MisusedModel, match=r"optimizer\.step\(\) ends it"):
        engine.begin_step_in_backward(optimizer, loss)
    optimizer.step()
    assert set(steps(engine)) == {1}


def test_a_step_in_backward_whose_loss_was_given_up_does_not_go_on_in_the_next() -> None:
    found = []
    for gives_up in (False, True):
        model, engine = wrapped()
        optimizer = adamw(model)
        if gives_up:
            engine.begin_step_in_backward(optimizer, plain(model, 9))
            optimizer.zero_grad()
        plain(model, 0).backward()
        engine.clip_grad_norm(1e-3)
        optimizer.step()
        optimizer.zero_grad()
        found.append(weights(model))
    assert differing(*found) == []


@pytest.mark.parametrize("device_groups", [0, 8])
def test_a_gradient_that_is_set_after_its_update_is_refused(device_groups: int) -> None:
    model, engine = wrapped(device_groups=device_groups)
    optimizer = adamw(model)
    loss = plain(model, 0)
    engine.begin_step_in_backward(optimizer, loss)
    loss.backward()
    with pytest.raises(MisusedModel, match="after its update"):
        model.blocks[0].a.weight.grad = torch.zeros(96, 96)


def raises(_: Tensor) -> None:
    raise ValueError("a hook of the user's")


@pytest.mark.parametrize("behind", [4, 2, 0])
@pytest.mark.parametrize("steps_too", [False, True])
def test_a_loop_goes_on_after_a_backward_pass_that_raised(behind: int, *, steps_too: bool) -> None:
    model, engine = wrapped()
    optimizer = adamw(model)
    for step in range(3):
        hidden = x = batch(step)
        for index, block in enumerate(model.blocks):
            hidden = block(hidden)
            if step == 1 and index == behind:
                hidden = hidden.clone()
                hidden.register_hook(raises)
        loss = distance(hidden, x)
        engine.begin_step_in_backward(optimizer, loss)
        if step == 1:
            with pytest.raises(ValueError, match="user's"):
                loss.backward()
            if steps_too:
                with pytest.raises(MisusedModel, match=rf"{7 - behind} of 8 .* checkpoint"):
                    optimizer.step()
        else:
            loss.backward()
            optimizer.step()
        optimizer.zero_grad()
    engine.flush()
    assert steps(engine)[0] == 2
    assert steps(engine)[-1] == 3


@pytest.mark.parametrize("in_backward", [False, True])
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("steps_too", [False, True])
def test_a_loop_goes_on_after_a_loss_that_is_not_finite(
    *, in_backward: bool, overlap: bool, steps_too: bool
) -> None:
    model, engine = wrapped(overlap=overlap)
    optimizer, raised = adamw(model), []
    for step in range(6):
        try:
            loss = plain(model, step) * (torch.nan if step == 1 else 1.0)
            if in_backward:
                engine.begin_step_in_backward(optimizer, loss)
            loss.backward()
            if not in_backward:
                engine.clip_grad_norm(None, [loss.detach()])
            optimizer.step()
        except Diverged as error:
            raised.append(str(error))
            if steps_too and in_backward and engine.graphs.broke_off:
                with pytest.raises(MisusedModel, match="0 of 8 parts .* compute it again"):
                    optimizer.step()
        optimizer.zero_grad()
    engine.flush()
    assert len(raised) == 1 and "the loss is nan" in raised[0]
    lost = 1 if in_backward or not overlap else 2  # the refusal is seen in the next forward pass
    assert set(steps(engine)) == {6 - lost}


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


def test_a_scaler_and_a_step_in_backward_are_refused_together() -> None:
    model, engine = wrapped(device_groups=8)
    optimizer = adamw(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=16.0)
    loss = plain(model, 0)
    engine.begin_step_in_backward(optimizer, loss)
    scaler.scale(loss).backward()
    with pytest.raises(MisusedModel, match="GradScaler"):
        scaler.step(optimizer)
