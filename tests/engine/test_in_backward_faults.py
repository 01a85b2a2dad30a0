"""Steps in backward that are given up, refused or used in odd ways, and beside other optimizers,
threads, scalers and blocks that look at weights of others."""

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
from fluxtrain.core.updates import updates
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


@pytest.mark.parametrize("device_groups", [0, 8])
def test_a_loss_that_is_not_finite_changes_nothing_that_is_updated_late(device_groups: int) -> None:
    model, engine = wrapped(device_groups=device_groups)
    optimizer, before = adamw(model), weights(model)
    loss = (plain(model, 0) + model.blocks[2].a.weight.square().sum()) * torch.nan
    try:
        engine.begin_step_in_backward(optimizer, loss)
        loss.backward()
        optimizer.step()
        engine.flush()
    except Diverged:
        optimizer.zero_grad()
        engine.forget_broken_pass()
    engine.updates.forget_refused()
    assert differing(before, weights(model)) == []
    assert set(steps(engine)) == {0}


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


def test_an_alias_that_is_gone_keeps_nothing_waiting() -> None:
    model, engine = wrapped()
    optimizer = adamw(model)
    model.state_dict()
    assert model.blocks[3].a.weight.detach().norm() > 0
    loss = plain(model, 0)
    engine.begin_step_in_backward(optimizer, loss)
    loss.backward()
    assert engine.step_in_backward is not None and len(engine.step_in_backward.updated) == len(
        engine.groups
    )
    optimizer.step()


def in_halves(model: Deep) -> list[list[nn.Parameter]]:
    return [list(model.blocks[:4].parameters()), list(model.blocks[4:].parameters())]


def by_kind(model: Deep) -> list[list[nn.Parameter]]:
    return [[p for p in model.parameters() if p.dim() == d] for d in (1, 2)]


@pytest.mark.parametrize("split", [in_halves, by_kind])
@pytest.mark.parametrize("device_groups", [0, 8])
@pytest.mark.parametrize(
    ("begins", "order"), [("a", "ab"), ("a", "ba"), ("ab", "ab"), ("ab", "ba")]
)
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


def test_unwrapping_before_the_step_leaves_what_was_updated_alone() -> None:
    found = []
    for unwraps in (False, True):
        model, engine = wrapped()
        optimizer = adamw(model)
        loss = plain(model, 0)
        engine.begin_step_in_backward(optimizer, loss)
        loss.backward()
        engine.clip_grad_norm(None)
        if unwraps:
            fluxtrain.unwrap(model)
        optimizer.step()
        if not unwraps:
            fluxtrain.unwrap(model)
        found.append({name: p.detach().clone() for name, p in model.named_parameters()})
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


def test_a_gradient_that_is_set_in_lent_memory_stays() -> None:
    """Of blocks that are not called in the second step, and had the last buffers of the first."""
    found = []
    for in_backward in (False, True):
        model, engine = wrapped()
        optimizer = adamw(model)
        for step in range(2):
            x = batch(step)
            hidden = x
            if step == 1:
                model.blocks[0].a.weight.grad = torch.full((96, 96), 0.5)
            for block in model.blocks[step:]:
                hidden = block(hidden)
            loss = distance(hidden, x)
            if in_backward:
                engine.begin_step_in_backward(optimizer, loss)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        found.append(weights(model))
    assert differing(*found) == []


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


def test_one_broken_model_of_two_under_an_optimizer() -> None:
    (a, first), (b, second) = wrapped(), wrapped()
    optimizer = torch.optim.AdamW([*a.parameters(), *b.parameters()])
    hidden = batch(0)
    for index, block in enumerate(a.blocks):
        hidden = block(hidden)
        if index == 3:
            hidden = hidden.clone()
            hidden.register_hook(raises)
    broken, fine = distance(hidden, batch(0)), plain(b, 0)
    first.begin_step_in_backward(optimizer, broken)
    second.begin_step_in_backward(optimizer, fine)
    fine.backward()
    with pytest.raises(ValueError, match="user's"):
        broken.backward()
    with pytest.raises(MisusedModel, match="12 of 16 parts"):
        optimizer.step()
    optimizer.zero_grad()
    assert all(p.grad is None for p in [*a.parameters(), *b.parameters()])


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


class WithLoose(Deep):
    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(96))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.gain


@pytest.mark.parametrize("in_backward", [False, True])
def test_parameters_outside_of_all_parts_keep_their_values_where_the_loss_is_not_finite(
    *, in_backward: bool
) -> None:
    torch.manual_seed(3)
    model = wrap_with(WithLoose(), device="cpu", offload="weights", device_groups=8)
    engine, optimizer = engine_of(model), adamw(model)
    loss = plain(model, 0) * torch.nan
    if in_backward:
        engine.begin_step_in_backward(optimizer, loss)
    loss.backward()
    engine.clip_grad_norm(None if in_backward else 1.0, [loss.detach()])
    optimizer.step()
    assert torch.equal(model.gain, torch.ones(96))


def test_a_graph_that_is_kept_for_an_in_backward_pass() -> None:
    found = []
    for in_backward in (False, True):
        model, engine = wrapped()
        optimizer = adamw(model)
        x = batch(0)
        loss = distance(model.blocks[1](model(x)), x)
        loss.backward(retain_graph=True)
        if in_backward:
            engine.begin_step_in_backward(optimizer, loss)
        loss.backward()
        optimizer.step()
        found.append(weights(model))
    assert differing(*found) == []


def test_gradients_that_a_hook_has_read_have_no_norm_any_more() -> None:
    model, engine = wrapped()
    optimizer = adamw(model)
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda p: p.grad.abs().max())
    loss = plain(model, 0)
    engine.begin_step_in_backward(optimizer, loss)
    loss.backward()
    with pytest.raises(MisusedModel, match="was used up"):
        engine.clip_grad_norm(None)
    optimizer.step()
    engine.flush()
    assert set(steps(engine)) == {1}


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
