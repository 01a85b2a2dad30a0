"""Which optimizers are taken over, by whom, and what happens to all others."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fluxtrain
from fluxtrain.core.wrap.engine import engine_of
from fluxtrain.errors import MisusedModel

Make = Callable[..., Any]


@pytest.fixture
def pair(new_model: Make) -> Iterator[Callable[..., tuple[Any, Any]]]:
    """The plain fp32 model and the same one wrapped."""
    wrapped: list[nn.Module] = []

    def make(family: str = "llama") -> tuple[Any, Any]:
        wrapped.append(fluxtrain.wrap(new_model(family, torch.float32), device="cpu"))
        return new_model(family, torch.float32), wrapped[-1]

    yield make
    for model in wrapped:
        fluxtrain.unwrap(model)


def loss_of(model: Any, seed: int) -> Tensor:
    ids = torch.randint(0, 320, (2, 8), generator=torch.Generator().manual_seed(seed))
    loss: Tensor = model(input_ids=ids, labels=ids).loss
    return loss


def train(model: Any, optimizer: torch.optim.Optimizer, steps: int, seed: int = 0) -> list[float]:
    losses = []
    for at in range(steps):

        def closure(at: int = at) -> Tensor:
            optimizer.zero_grad()
            loss = loss_of(model, seed + at)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            return loss

        losses.append(float(optimizer.step(closure).detach()))  # type: ignore[arg-type]
    return losses


def plain_loop(
    model: Any, optimizer: torch.optim.Optimizer, steps: int, seed: int = 0
) -> list[float]:
    losses = []
    for at in range(steps):
        loss = loss_of(model, seed + at)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


class MyAdamW(torch.optim.AdamW):
    """A subclass may compute something else, so it is left alone."""


TAKEN_OVER: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "AdamW": lambda p: torch.optim.AdamW(p, lr=1e-2, eps=1e-5),
    "foreach": lambda p: torch.optim.AdamW(p, lr=1e-2, eps=1e-5, foreach=True),
    "fused": lambda p: torch.optim.AdamW(p, lr=1e-2, eps=1e-5, fused=True),
    "maximize": lambda p: torch.optim.AdamW(p, lr=1e-3, eps=1e-5, maximize=True),
    "tensor lr": lambda p: torch.optim.AdamW(p, lr=torch.tensor(1e-2), eps=1e-5),
    "Adam": lambda p: torch.optim.Adam(p, lr=1e-2, eps=1e-5, betas=(0.8, 0.9)),
}
LEFT_ALONE: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "foreach SGD": lambda p: torch.optim.SGD(p, lr=0.1, foreach=True),
    "Adam with L2": lambda p: torch.optim.Adam(p, lr=1e-2, eps=1e-5, weight_decay=0.1),
    "amsgrad": lambda p: torch.optim.AdamW(p, lr=1e-2, eps=1e-5, amsgrad=True),
    "Adafactor": lambda p: torch.optim.Adafactor(p, lr=1e-2),
    "a subclass": lambda p: MyAdamW(p, lr=1e-2, eps=1e-5),
}


@pytest.mark.thinned(6)
@pytest.mark.parametrize("loop", [plain_loop, train], ids=["loop", "closure"])
@pytest.mark.parametrize("kind", [*TAKEN_OVER, *LEFT_ALONE])
def test_each_optimizer_follows_the_plain_model(
    pair: Make, kind: str, loop: Any, caplog: pytest.LogCaptureFixture
) -> None:
    plain, wrapped = pair()
    make = (TAKEN_OVER | LEFT_ALONE)[kind]
    optimizer = make(wrapped.parameters())
    got, expected = loop(wrapped, optimizer, 3), loop(plain, make(plain.parameters()), 3)
    assert got == pytest.approx(expected, rel=1e-4)
    assert ("fluxtrain" in optimizer.state) == (kind in TAKEN_OVER)
    said = [r for r in caplog.records if "runs on the host" in r.message]
    assert len(said) == (kind in LEFT_ALONE)


def test_an_optimizer_that_calls_its_closure_many_times_sees_new_gradients_each_time(
    pair: Make,
) -> None:
    def fixed(model: Any) -> list[float]:
        optimizer = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=4)

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = loss_of(model, 0)
            loss.backward()
            return loss

        return [float(optimizer.step(closure).detach()) for _ in range(3)]  # type: ignore[arg-type]

    plain, wrapped = pair()
    expected = fixed(plain)
    assert fixed(wrapped) == pytest.approx(expected, rel=1e-3)
    assert expected[-1] < expected[0]


def test_a_new_optimizer_after_the_first_was_dropped_starts_anew_as_torchs_does(pair: Make) -> None:
    results = []
    for model in pair():
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-5)
        schedule = torch.optim.lr_scheduler.LinearLR(optimizer)  # keeps it in a cycle
        plain_loop(model, optimizer, 3)
        del optimizer, schedule
        results.append(
            plain_loop(model, torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-5), 3, seed=9)
        )
    assert results[1] == pytest.approx(results[0], rel=1e-5)


def test_a_second_optimizer_over_a_stepped_parameter_is_refused_by_name(pair: Make) -> None:
    _, model = pair()
    first = torch.optim.AdamW(model.parameters(), lr=1e-3)
    plain_loop(model, first, 2)
    second = torch.optim.AdamW(model.model.layers[1].parameters(), lr=1e-3)
    loss_of(model, 0).backward()
    with pytest.raises(MisusedModel, match="stepped 2 times"):
        second.step()
    assert len(first.param_groups) == 1


def test_optimizers_over_different_parameters_work_side_by_side(pair: Make) -> None:
    results = []
    for model in pair():
        blocks = torch.optim.AdamW(model.model.layers.parameters(), lr=1e-2, eps=1e-5)
        ids = {id(p) for p in model.model.layers.parameters()}
        others = torch.optim.AdamW(
            [p for p in model.parameters() if id(p) not in ids], lr=1e-3, eps=1e-5
        )
        losses = []
        for at in range(3):
            loss = loss_of(model, at)
            loss.backward()
            for optimizer in (others, blocks):
                optimizer.step()
                optimizer.zero_grad()
            losses.append(loss.item())
        results.append(losses)
    assert results[1] == pytest.approx(results[0], rel=1e-5)


def test_one_optimizer_over_two_wrapped_models_and_a_plain_layer(pair: Make) -> None:
    results = []
    for left, right in zip(pair("llama"), pair("gpt2"), strict=True):
        torch.manual_seed(1)
        layer = nn.Linear(2, 1)
        parts: list[Any] = [left, layer, right]
        optimizer = torch.optim.AdamW(
            [p for part in parts for p in part.parameters()], lr=1e-2, eps=1e-5
        )
        losses = []
        for at in range(3):
            loss = layer(torch.stack([loss_of(left, at), loss_of(right, at)])).square().sum()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        results.append(losses)
    assert results[1] == pytest.approx(results[0], rel=1e-4)


def test_parameters_put_into_another_order_are_refused(pair: Make) -> None:
    _, model = pair()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    plain_loop(model, optimizer, 1)
    optimizer.param_groups[0]["params"].reverse()
    loss_of(model, 0).backward()
    with pytest.raises(MisusedModel, match="order"):
        optimizer.step()


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
