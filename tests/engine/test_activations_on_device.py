"""Boundaries of the last blocks that stay on the device change what is copied, and no bit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

import fluxtrain
from fluxtrain.core.wrap.engine import Engine, engine_of
from fluxtrain.core.wrap.grouping import facts_of
from fluxtrain.plan.facts import RowFacts
from fluxtrain.plan.footprint import Layout, block_inputs_on_host_bytes, offloading_blocks
from tests.engine.placing_anew import turn_to
from tests.wrap_with import wrap_with

LAYERS = 6
BLOCK_INPUT = 4 * 10 * 32 * 2  # rows, tokens, width, bf16


class Training:
    """A small model whose boundaries wait on the host, but for those of the last `staying`."""

    def __init__(self, tiny: Any, batch: Callable[..., Any], staying: int, **where: Any) -> None:
        model = tiny("llama", torch.bfloat16, num_hidden_layers=LAYERS)
        row = RowFacts(
            hidden=32, vocabulary=96, sequence_length=10, dtype_bytes=2, activation_bytes=1 << 16
        )
        self.facts = replace(facts_of(model), row=row)
        self.layout = Layout(
            **{"offload": "weights", "activations": "host", **where},
            batch_rows=4, chunk_rows=2, activations_on_device=staying,
        )  # fmt: skip
        settings = {"offload": "weights", "activations": "host", "chunk_rows": 2, **where}
        self.model = wrap_with(model, device="cpu", **settings)
        self.engine: Engine = engine_of(self.model)
        turn_to(self.engine, activations_on_device=staying)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.batch, self.losses = batch, list[float]()

    def loss(self, part: int = 0) -> torch.Tensor:
        found: torch.Tensor = self.model(**self.batch(seed=10 * len(self.losses) + part)).loss
        return found

    def step(self, passes: int = 1) -> tuple[int, int]:
        """Tensors sent to the host in the last pass of the step, and bytes that stayed."""
        for part in range(passes):
            before = self.engine.cards[0].activation_offload.offloaded_count
            loss = self.loss(part)
            held = (
                self.engine.memory().device_by["activations"],
                self.engine.cards[0].activation_offload.offloaded_count - before,
            )
            loss.backward()
        self.engine.clip_grad_norm(1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.losses.append(float(loss.detach()))
        assert self.engine.memory().device_by["activations"] == 0
        return held[1], held[0]

    def turn(self, staying: int, kept: int = 0) -> None:
        turn_to(self.engine, blocks_without_recompute=kept, activations_on_device=staying)

    def weights(self) -> list[torch.Tensor]:
        fluxtrain.sync(self.model)
        return [p.detach().clone() for p in self.model.parameters()]


def same(one: Training, other: Training) -> bool:
    alike = zip(one.weights(), other.weights(), strict=True)
    return one.losses == other.losses and all(torch.equal(a, b) for a, b in alike)


PLACES: list[dict[str, Any]] = [
    {"offload": "weights"},
    {"offload": "max"},
    {"offload": "weights", "device_groups": 3, "resident_blocks": 1},
    {"offload": "weights", "resident_blocks": LAYERS, "blocks_without_recompute": 2},
    {"offload": "none"},
]


@pytest.mark.parametrize("where", PLACES, ids=str)
@pytest.mark.parametrize("staying", [1, 3, LAYERS])
@pytest.mark.thinned(3)
def test_losses_and_weights_keep_their_bits_and_what_stays_is_what_is_planned(
    tiny: Any, batch: Any, where: dict[str, Any], staying: int
) -> None:
    every, some = Training(tiny, batch, 0, **where), Training(tiny, batch, staying, **where)
    kept = where.get("blocks_without_recompute", 0)
    for _ in range(3):
        sent, held = every.step()
        assert sent * BLOCK_INPUT == block_inputs_on_host_bytes(every.facts, every.layout)
        assert held == (LAYERS + 1 - sent) * BLOCK_INPUT
        sent, held = some.step()
        assert sent == offloading_blocks(some.facts, some.layout) == max(0, LAYERS - kept - staying)
        assert sent * BLOCK_INPUT == block_inputs_on_host_bytes(some.facts, some.layout)
        assert held == (LAYERS + 1 - sent) * BLOCK_INPUT
    assert same(every, some)


def test_their_number_changes_between_two_steps(tiny: Any, batch: Any) -> None:
    every, turned = (
        Training(tiny, batch, 0, resident_blocks=LAYERS),
        Training(tiny, batch, 4, resident_blocks=LAYERS),
    )
    for staying, kept in ((2, 0), (0, 0), (LAYERS, 0), (1, 3), (5, 3), (0, 0)):
        turned.turn(staying, kept)
        every.step()
        every.step()
        turned.step()
        sent, held = turned.step()
        assert sent == max(0, LAYERS - kept - staying) + (staying == 0)
        assert held == (LAYERS + 1 - sent) * BLOCK_INPUT
        assert turned.engine.plan.layout.activations_on_device == staying
    assert same(every, turned)
