"""Random programs on a GPU's streams have the bits of copies in order."""

from __future__ import annotations

import gc
import random
from concurrent.futures import CancelledError, Future
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fluxtrain
from fluxtrain.core.device.arena import HostArena
from fluxtrain.core.wrap import wrap as wrapping
from fluxtrain.errors import Diverged
from fluxtrain.plan import depths, heads
from tests.engine.gpu_streams import streaming
from tests.engine.row_models import inputs, llama
from tests.wrap_with import wrap_with

DONE_BETWEEN = ("read", "halve", "drop", "zero", "look", "collect", *8 * ("nothing",))
Act = tuple[str, int]


def program(drawn: random.Random) -> list[Act]:
    """Steps of one to four passes, with something between these."""
    acts: list[Act] = []
    for _ in range(3):
        for _ in range(drawn.choice((1, 2, 2, 3, 4))):
            acts.append(("backward", len(acts)))
            acts.append((drawn.choice(DONE_BETWEEN), drawn.randrange(100)))
        acts += drawn.choice(([], [("clip", 0)]))
        acts += drawn.choice(([("step", 0), ("zero", 0)], [("step", 0), ("zero", 0)], []))
    return [*acts, ("zero", 0), ("backward", 0), ("backward", 1), ("step", 0)]


def options(drawn: random.Random) -> dict[str, Any]:
    found: dict[str, Any] = {
        "offload": drawn.choice(("weights", "weights", "max")),
        "chunk_rows": drawn.choice((1, 2, 4)),
        "overlap": drawn.random() < 0.7,
        "states": drawn.choice(("fp32", "bf16", "8bit")),
        "embedding": drawn.choice(("whole", "rows")),
        "head": drawn.choice(("whole", "chunks")),
        "activations": drawn.choice(("auto", "host", "device")),
        "device_groups": drawn.choice((0, 0, 1, 3)),
    }
    return found | {"deferred_moments": found["states"] == "fp32"}


class Loop:
    """A user's loop; what is done in it is a method each. `found`: losses, gradients, norms."""

    def __init__(self, model: nn.Module) -> None:
        self.model, self.parameters = model, list(model.parameters())
        self.optimizer = torch.optim.AdamW(self.parameters, lr=1e-2, weight_decay=0.1)
        self.found: list[Tensor] = []

    def outcome(self, acts: list[Act]) -> list[Tensor]:
        """What was found, and the weights in the end."""
        for act, number in acts:
            getattr(self, act)(number)
        fluxtrain.sync(self.model)
        return [*self.found, *(p.detach().clone() for p in self.parameters)]

    def forward(self, seed: int) -> Tensor:
        loss: Tensor = self.model(**inputs(seed)).loss
        self.found.append(loss.detach())
        return loss

    def backward(self, seed: int) -> None:
        self.forward(seed).backward()

    def look(self, seed: int) -> None:
        with torch.no_grad():
            self.forward(seed)

    def read(self, _: int) -> None:
        self.found += [p.grad.detach().clone() for p in self.parameters if p.grad is not None]

    def halve(self, number: int) -> None:
        gradient = self.parameters[number % len(self.parameters)].grad
        if gradient is not None:
            gradient.mul_(0.5)

    def drop(self, number: int) -> None:
        self.parameters[number % len(self.parameters)].grad = None

    def clip(self, _: int) -> None:
        self.found.append(torch.nn.utils.clip_grad_norm_(self.parameters, 0.5))

    def step(self, _: int) -> None:
        self.optimizer.step()

    def zero(self, _: int) -> None:
        self.optimizer.zero_grad()

    def nothing(self, _: int) -> None:
        """The next pass follows at once: its sums wait for their way home."""

    def collect(self, _: int) -> None:
        gc.collect()


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.thinned(2)
def test_passes_have_the_bits_of_copies_in_order(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn = random.Random(seed)
    monkeypatch.setattr(heads, "VOCAB_CHUNK_BYTES", 1)
    monkeypatch.setattr(heads, "MULTIPLE_ROWS", 128)
    if drawn.random() < 0.3:  # of what is so large one buffer alone is on the device
        monkeypatch.setattr(depths, "LARGE_STAGING_BYTES", 1)
    dtype, tied = drawn.choice((torch.float32, torch.bfloat16)), drawn.random() < 0.4
    placed, acts = options(drawn), program(drawn)

    def trained() -> list[Tensor]:
        model = llama(dtype, tie_word_embeddings=tied)
        return Loop(wrap_with(model, device="cpu", **placed)).outcome(acts)

    wanted = trained()
    opened = streaming(monkeypatch, seed)
    for found, value in zip(trained(), wanted, strict=True):
        assert torch.equal(found, value)
    (device,) = opened
    device.close()


@pytest.mark.parametrize("how", [CancelledError, Diverged])
def test_who_waits_for_a_copy_of_what_never_comes_is_told(
    how: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    streaming(monkeypatch, seed=0)
    device = wrapping.open_device(torch.device("cuda"))
    arenas = (HostArena(512, pin=True) for _ in range(100))
    arena = next(arena for arena in arenas if arena.pinned_bytes)
    update = Future[None]()
    transfer = device.upload(torch.empty(128), arena.tensor(torch.float32, 128, 0), update, None)
    assert not transfer.failed()
    if how is CancelledError:
        update.cancel()
    else:
        update.set_exception(how("the norm is not finite"))
    assert transfer.failed()
    with pytest.raises(how):
        transfer.wait_host()
