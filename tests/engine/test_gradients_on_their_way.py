"""Who asks only whether there are gradients does not wait until they are on the host."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fluxtrain
from fluxtrain.core.wrap.engine import Engine, engine_of
from tests.wrap_with import wrap_with

Make = Callable[..., Any]
LIMIT_S = 20.0  # a test that waits for what does not come fails after that


class Held:
    """A wrapped model of which the last gradient does not come home until `let_go`."""

    def __init__(self, model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
        self.model = wrap_with(
            model, device="cpu", offload="weights", device_groups=0, embedding="whole", overlap=True
        )
        self.engine: Engine = engine_of(self.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.last = self.engine.groups[0]
        self._gate = threading.Event()
        device: Any = self.engine.device
        download = device.download

        def held(to: Tensor, source: Tensor) -> Any:
            first = [segment.rounded for segment in self.last.trained]
            if any(flat is not None and flat.data_ptr() == to.data_ptr() for flat in first):
                device._down.submit(lambda: self._gate.wait(LIMIT_S))
            return download(to, source)

        monkeypatch.setattr(device, "download", held)

    def let_go(self) -> None:
        self._gate.set()

    def backward(self, seed: int = 0) -> None:
        ids = torch.randint(0, 320, (2, 12), generator=torch.Generator().manual_seed(seed))
        self.model(input_ids=ids, labels=ids).loss.backward()

    @property
    def under_way(self) -> bool:
        arrival = self.engine.cards[0].gradients.host.arrivals[self.last]
        return not all(transfer.done() for transfer in arrival.transfers)


@pytest.fixture
def held(new_model: Make, monkeypatch: pytest.MonkeyPatch) -> Iterator[Held]:
    made = Held(new_model("llama", torch.float32), monkeypatch)
    yield made
    made.let_go()
    fluxtrain.unwrap(made.model)


@pytest.mark.parametrize("of", ["optimizer", "model", "engine"])
def test_gradients_are_forgotten_while_they_are_on_their_way(held: Held, of: str) -> None:
    held.backward()
    transfers = held.engine.cards[0].gradients.host.arrivals[held.last].transfers
    held.engine.clip_grad_norm(1.0)
    held.optimizer.step()
    if of == "engine":
        held.engine.forget_gradients()
    else:
        {"optimizer": held.optimizer, "model": held.model}[of].zero_grad()
    assert not all(transfer.done() for transfer in transfers)
    assert not held.engine.cards[0].gradients.host.arrivals
    held.let_go()
    assert all(parameter.grad is None for parameter in held.model.parameters())


def test_a_look_at_the_values_waits_for_them(held: Held, new_model: Make) -> None:
    held.backward()
    plain = new_model("llama", torch.float32)
    ids = torch.randint(0, 320, (2, 12), generator=torch.Generator().manual_seed(0))
    plain(input_ids=ids, labels=ids).loss.backward()
    gradients = [parameter.grad for parameter in held.model.parameters()]
    assert held.under_way
    threading.Timer(0.2, held.let_go).start()
    for got, parameter in zip(gradients, plain.parameters(), strict=True):
        assert got is not None
        assert parameter.grad is not None
        torch.testing.assert_close(got.clone(), parameter.grad, rtol=2e-5, atol=1e-7)
    assert not held.under_way


def test_steps_whose_gradients_were_forgotten_on_their_way_have_the_same_bits(
    held: Held, new_model: Make
) -> None:
    """Their updates wait for them, and the next backward pass for the updates."""
    other = fluxtrain.wrap(
        new_model("llama", torch.float32), device="cpu", offload="none", overlap=False
    )
    optimizer = torch.optim.AdamW(other.parameters(), lr=1e-3)
    for step in range(3):
        ids = torch.randint(0, 320, (2, 12), generator=torch.Generator().manual_seed(step))
        other(input_ids=ids, labels=ids).loss.backward()
        engine_of(other).clip_grad_norm(1.0)
        optimizer.step()
        optimizer.zero_grad()
        held.backward(step)
        held.engine.clip_grad_norm(1.0)
        held.optimizer.step()
        held.optimizer.zero_grad()
        threading.Timer(0.05, held.let_go).start()
    held.engine.flush()
    for (name, a), b in zip(held.model.named_parameters(), other.parameters(), strict=True):
        assert torch.equal(a.detach().clone(), b.detach().clone()), name
    fluxtrain.unwrap(other)
