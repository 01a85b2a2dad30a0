"""On a device whose copies come late and out of order, training has the bits of one in order."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from torch import Tensor

import fluxtrain
from fluxtrain.core.wrap.engine import engine_of
from tests.engine.slow_device import scalers_on_a_gpu, slowed
from tests.wrap_with import wrap_with

HALF = torch.float16
FIRST = 2.0**16


def state(model: torch.nn.Module) -> dict[str, Tensor]:
    """Everything that training changes, as copies."""
    return {
        f"{shard}.{name}": tensor.clone()
        for shard, tensors in engine_of(model).state_shards()
        for name, tensor in tensors.items()
    }


class Loop:
    """A model that streams, in a user's loop of its own."""

    def __init__(self, model: torch.nn.Module, **options: Any) -> None:
        options = {"offload": "weights", "overlap": True, "chunk_rows": 2, **options}
        self.model = wrap_with(model, **options)
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(self.parameters, lr=1e-3)
        self.scaler = fluxtrain.GradScaler("cpu", init_scale=2.0**20)

    def loss(self, inputs: dict[str, Tensor]) -> Tensor:
        loss: Tensor = self.model(**inputs).loss
        return loss


def with_a_scaler(loop: Loop, inputs: dict[str, Tensor]) -> None:
    """Some of its steps overflow and are left out."""
    loop.scaler.scale(loop.loss(inputs)).backward()
    loop.scaler.unscale_(loop.optimizer)
    torch.nn.utils.clip_grad_norm_(loop.parameters, 1.0)
    loop.scaler.step(loop.optimizer)
    loop.scaler.update()
    loop.optimizer.zero_grad()


def with_the_engines_norm(loop: Loop, inputs: dict[str, Tensor]) -> None:
    loop.loss(inputs).backward()
    engine_of(loop.model).clip_grad_norm(1.0)
    loop.optimizer.step()
    loop.optimizer.zero_grad()


def in_two_passes(loop: Loop, inputs: dict[str, Tensor]) -> None:
    loop.loss(inputs).backward()
    loop.loss(inputs).backward()
    loop.optimizer.step()
    loop.optimizer.zero_grad()


def with_steps_left_out(loop: Loop, inputs: dict[str, Tensor]) -> None:
    for steps in (False, True):
        loop.loss(inputs).backward()
        if steps:
            loop.optimizer.step()
        loop.optimizer.zero_grad()


def with_evaluations(loop: Loop, inputs: dict[str, Tensor]) -> None:
    with_the_engines_norm(loop, inputs)
    with torch.no_grad():
        loop.loss(inputs)


def in_backward(loop: Loop, inputs: dict[str, Tensor]) -> None:
    engine_of(loop.model).begin_step_in_backward(loop.optimizer)
    loop.loss(inputs).backward()
    loop.optimizer.step()
    loop.optimizer.zero_grad()


LOOPS = [
    with_a_scaler, with_the_engines_norm, in_two_passes, with_steps_left_out, with_evaluations,
    in_backward,
]  # fmt: skip
PLACES: list[dict[str, Any]] = [
    {},
    {"device_groups": 3, "device_first": "blocks"},  # 0, 1 and 3
    {"offload": "max"},
    {"deferred_moments": True},
    {"embedding": "rows", "resident_blocks": 1},
]


@pytest.fixture(scope="module")
def without_delays() -> dict[Any, dict[str, Tensor]]:
    """By the loop's step: what three of them end with, in the first of the places."""
    return {}


@pytest.mark.parametrize("place", PLACES, ids=str)
@pytest.mark.parametrize("step", LOOPS)
@pytest.mark.thinned(5)
def test_a_loop_has_the_bits_that_it_has_without_delays(
    tiny: Any, batch: Any, same: Any, monkeypatch: pytest.MonkeyPatch, step: Any, place: Any,
    without_delays: dict[Any, dict[str, Tensor]],
) -> None:  # fmt: skip
    def trained(place: dict[str, Any]) -> dict[str, Tensor]:
        dtype = HALF if step is with_a_scaler else torch.bfloat16
        loop = Loop(tiny("llama", dtype, num_hidden_layers=4), **place)
        for number in range(3):
            step(loop, batch(seed=number))
        return state(loop.model)

    if step not in without_delays:
        without_delays[step] = trained(PLACES[0])
    slowed(monkeypatch, 1)
    same(trained(place), without_delays[step])


@pytest.mark.parametrize("dtype", [HALF, torch.bfloat16])
def test_a_scale_that_is_on_its_way_to_the_host_is_waited_for(
    tiny: Any, batch: Any, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    model = fluxtrain.wrap(tiny("llama", dtype))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scaler = fluxtrain.GradScaler("cpu", init_scale=FIRST)
    scaler.scale(model(**batch()).loss).backward()
    with scalers_on_a_gpu(monkeypatch):
        scaler.unscale_(optimizer)
    members = [m for group in engine_of(model).groups for m in group.members]
    assert {m.gradient_scale for m in members if m.has_gradient} == {1 / FIRST}
    (found,) = scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"].values()
    assert float(found) == 0.0


def test_a_gradient_that_is_set_is_not_overwritten_by_one_that_was_dropped(
    tiny: Any, batch: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    slowed(monkeypatch, 0)
    model = wrap_with(tiny("llama", torch.bfloat16), offload="weights", device_groups=0)
    engine = engine_of(model)
    monkeypatch.setattr(engine.device, "delay", lambda: time.sleep(0.02))
    model(**batch()).loss.backward()
    for parameter in model.parameters():
        parameter.grad = None  # unread: its bytes are on their way home
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    engine.cards[0].gradients.host.drain()
    differ = [n for n, p in model.named_parameters() if not bool((p.grad == 1).all())]
    assert not differ
