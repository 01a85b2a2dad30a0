"""Optimizers over wrapped parameters: taken over, foreign, several, saved and restored."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fluxtrain
from fluxtrain.core.wrap.engine import engine_of
from fluxtrain.errors import MisusedModel

Make = Callable[..., torch.optim.Optimizer]


def step(model: nn.Module, optimizer: torch.optim.Optimizer, inputs: dict[str, Tensor]) -> float:
    loss = model(**inputs).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return float(loss.detach())


# -- which optimizers run where --------------------------------------------------------------------

FOREIGN: dict[str, tuple[Make, dict[str, Any]]] = {
    "sgd": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}),
    "sgd foreach": (torch.optim.SGD, {"lr": 0.1, "foreach": True}),
    "adafactor": (torch.optim.Adafactor, {"lr": 0.01}),
    "rmsprop": (torch.optim.RMSprop, {"lr": 1e-3}),
    "adamw amsgrad": (torch.optim.AdamW, {"lr": 1e-3, "amsgrad": True}),
    "adam with decay": (torch.optim.Adam, {"lr": 1e-3, "weight_decay": 0.1}),
}


@pytest.mark.parametrize("name", FOREIGN)
def test_other_optimizers_run_on_the_host_as_they_are_and_say_so(
    name: str, tiny: Any, batch: Any, weights: Any, close: Any, caplog: Any
) -> None:
    make, options = FOREIGN[name]
    plain, wrapped = tiny("llama"), fluxtrain.wrap(tiny("llama"), chunk_rows=2)
    for model in (plain, wrapped):
        optimizer = make(model.parameters(), **options)
        for seed in range(3):
            model(**batch(seed=seed)).loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
    close(weights(plain), weights(wrapped), 1e-3)
    assert caplog.text.count("runs on the host") == 1


def test_a_subclass_of_adamw_is_left_alone(tiny: Any, batch: Any, caplog: Any) -> None:
    class Halved(torch.optim.AdamW):
        def step(self, closure: Any = None) -> Any:
            for group in self.param_groups:
                for p in group["params"]:
                    p.grad.mul_(0.5)
            return super().step(closure)

    model = fluxtrain.wrap(tiny("llama"))
    optimizer = Halved(model.parameters(), lr=1e-2)
    losses = [step(model, optimizer, batch()) for _ in range(3)]
    assert losses[2] < losses[0]
    assert "Halved runs on the host" in caplog.text
    assert "exp_avg" in optimizer.state[model.lm_head.weight]


@pytest.mark.parametrize(
    "options", [{"fused": True}, {"foreach": True}, {"foreach": False}, {"maximize": True}], ids=str
)
def test_every_form_of_adamw_is_taken_over_with_the_same_arithmetic(
    options: dict[str, bool], tiny: Any, batch: Any, weights: Any, close: Any, caplog: Any
) -> None:
    plain, wrapped = tiny("llama"), fluxtrain.wrap(tiny("llama"))
    for model in (plain, wrapped):
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, **options)
        for seed in range(3):
            step(model, optimizer, batch(seed=seed))
    close(weights(plain), weights(wrapped), 1e-3)
    assert "runs on the host" not in caplog.text
    assert not any(p in optimizer.state for p in wrapped.parameters())


def test_zeroed_gradients_and_dropped_ones_give_the_same_next_step(
    tiny: Any, batch: Any, weights: Any, close: Any
) -> None:
    found = []
    for to_none in (True, False):
        model = fluxtrain.wrap(tiny("llama"))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        for seed in range(3):
            model(**batch(seed=seed)).loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=to_none)
        found.append(weights(model))
    close(found[0], found[1], 1e-5)


# -- one optimizer a parameter ---------------------------------------------------------------------


def test_a_second_optimizer_over_a_stepped_parameter_is_an_error(tiny: Any, batch: Any) -> None:
    model = fluxtrain.wrap(tiny("llama"))
    first = torch.optim.AdamW(model.parameters(), lr=1e-3)
    second = torch.optim.AdamW(model.lm_head.parameters(), lr=1e-3)
    step(model, first, batch())
    model(**batch()).loss.backward()
    with pytest.raises(MisusedModel, match="a second optimizer steps lm_head.weight"):
        second.step()
    del first
    second.step()  # its own from now on


def test_two_optimizers_over_different_parameters_are_two_halves_of_one(
    tiny: Any, batch: Any, weights: Any, same: Any
) -> None:
    found = []
    for halves in (1, 2):
        model = fluxtrain.wrap(tiny("llama"))
        every = list(model.parameters())
        parts = [every] if halves == 1 else [every[::2], every[1::2]]
        optimizers = [torch.optim.AdamW(part, lr=1e-2) for part in parts]
        for seed in range(3):
            model(**batch(seed=seed)).loss.backward()
            for optimizer in optimizers:
                optimizer.step()
            for optimizer in optimizers:
                optimizer.zero_grad()
        found.append(weights(model))
    same(found[0], found[1])


def test_two_models_under_one_optimizer_are_both_stepped(
    tiny: Any, batch: Any, weights: Any, same: Any
) -> None:
    alone = fluxtrain.wrap(tiny("llama"))
    step(alone, torch.optim.AdamW(alone.parameters(), lr=1e-2), batch())
    pair = [fluxtrain.wrap(tiny("llama"), overlap=o) for o in (False, True)]
    optimizer = torch.optim.AdamW([p for m in pair for p in m.parameters()], lr=1e-2)
    for model in pair:
        model(**batch()).loss.backward()
    optimizer.step()
    for model in pair:
        same(weights(model), weights(alone))


# -- state -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("second", [torch.optim.AdamW, torch.optim.RMSprop])
def test_clipping_holds_for_every_optimizer_of_the_step(
    second: Make, tiny: Any, batch: Any, weights: Any, close: Any
) -> None:
    """One norm over all gradients, two optimizers; eps large enough for the size to count."""
    found = []
    for wrapped in (False, True):
        model = tiny("llama")
        if wrapped:
            fluxtrain.wrap(model)
        every = list(model.parameters())
        optimizers = [
            torch.optim.AdamW(every[::2], lr=1e-2, eps=1e-2),
            second(every[1::2], lr=1e-2, eps=1e-2),
        ]
        for seed in range(3):
            model(**batch(seed=seed)).loss.backward()
            if wrapped:
                engine_of(model).clip_grad_norm(0.05)
            else:
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
            for optimizer in optimizers:
                optimizer.step()
            model.zero_grad()
        found.append(weights(model))
    close(found[0], found[1], 1e-5)
