"""A change between two steps keeps the bits, and everything is accounted."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import fluxtrain
from fluxtrain.core.memory.group_memory import GroupMemory
from fluxtrain.core.memory.window import Window
from fluxtrain.core.wrap.engine import Engine, engine_of
from fluxtrain.core.wrap.grouping import facts_of
from fluxtrain.errors import DoesNotFit
from fluxtrain.plan import states as state_formats
from fluxtrain.plan.facts import RowFacts
from fluxtrain.plan.footprint import Layout, footprint
from fluxtrain.train.live.apply_placement import apply_placement
from fluxtrain.train.live.live_run import LiveRun
from fluxtrain.train.live.settings import LiveSettings
from tests.live_settings import settings_with
from tests.placements import placement_of
from tests.wrap_with import wrap_with

LAYERS = 6


def ground_of(model: nn.Module, states: Any, offload: Any, device_first: Any) -> LiveRun:
    """Facts of a model before it is wrapped, with a row's."""
    row = RowFacts(
        hidden=32, vocabulary=96, sequence_length=10, dtype_bytes=4, activation_bytes=1 << 16
    )
    facts = replace(facts_of(model, states), row=row)
    layout = Layout(offload=offload, batch_rows=4, chunk_rows=2, device_first=device_first)
    placement = placement_of(facts, layout, footprint(facts, layout, has_gpu=False))
    return LiveRun(facts, placement, has_gpu=False)


def turn(engine: Engine, ground: LiveRun, settings: LiveSettings) -> None:
    apply_placement(engine, ground.placement_with(settings))


class Training:
    """A small model in training whose engine can be turned between its steps."""

    def __init__(
        self,
        model: nn.Module,
        batch: Callable[..., Any],
        states: Any = "fp32",
        offload: Any = "weights",
        device_first: Any = "embedding",
    ) -> None:
        self.context = ground_of(model, states, offload, device_first)
        self.model = wrap_with(
            model, device="cpu", offload=offload, chunk_rows=2, overlap=True, states=states,
            device_first=device_first,
        )  # fmt: skip
        self.engine = engine_of(self.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.batch = batch
        self.losses: list[float] = []

    def steps(self, count: int) -> list[float]:
        for _ in range(count):
            loss = self.model(**self.batch(seed=len(self.losses))).loss
            loss.backward()
            self.engine.clip_grad_norm(1.0)
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.losses.append(float(loss.detach()))
        return self.losses

    def weights(self) -> list[torch.Tensor]:
        fluxtrain.sync(self.model)
        return [p.detach().clone() for p in self.model.parameters()]


@pytest.fixture
def training(tiny: Any, batch: Any) -> Callable[..., Training]:
    def fresh(
        states: Any = "fp32", family: str = "llama", offload: str = "weights",
        device_first: str = "embedding",
    ) -> Training:  # fmt: skip
        model = tiny(family, torch.bfloat16, num_hidden_layers=LAYERS)
        return Training(model, batch, states, offload, device_first)

    return fresh


def test_the_window_the_counters_and_the_residency_are_those_of_the_new_layout(
    training: Callable[[], Training],
) -> None:
    run = training()
    run.steps(2)
    before = run.engine.memory().device_by["weights"]
    assert before == run.context.need(run.context.planned).weights_bytes
    for prefetch, resident in ((2, 2), (4, 2), (1, 0), (1, LAYERS), (2, 0)):
        settings = settings_with(run.context, prefetch=prefetch, resident_blocks=resident)
        turn(run.engine, run.context, settings)
        run.steps(2)
        assert run.engine.memory().device_by["weights"] == run.context.need(settings).weights_bytes
        with torch.no_grad():
            run.model(**run.batch())  # what is resident is there when it was used
        assert run.engine.residency().weights.startswith("G" * resident)
        assert run.engine.plan.totals.resident_blocks == resident
        assert run.engine.plan.slots == len(
            [s for s in run.engine.cards[0].window.slots if not s.owner]
        )
        assert run.engine.plan.need == run.context.need(settings)
    assert run.engine.memory().device_by["weights"] == before


def test_running_out_of_device_memory_leaves_everything_as_it_was(
    training: Callable[[], Training], monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, run = training(), training()
    plain.steps(4)
    run.steps(2)
    before, plan = run.engine.memory().device_by, run.engine.plan
    real, calls = Window.add_slot, 0

    def scarce(self: Window, size_bytes: int, owner: Any = None) -> Any:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise DoesNotFit("CUDA out of memory")
        return real(self, size_bytes, owner)

    monkeypatch.setattr(Window, "add_slot", scarce)
    with pytest.raises(DoesNotFit):
        turn(
            run.engine,
            run.context,
            settings_with(run.context, prefetch=2, resident_blocks=4, chunk_rows=4),
        )
    assert calls == 3
    assert run.engine.memory().device_by == before
    assert run.engine.plan is plan
    assert run.engine.chunk_rows == 2
    assert run.steps(2) == plain.losses


@pytest.mark.thinned(1)
@pytest.mark.parametrize("states", ["fp32", "bf16", "8bit"])
def test_whole_parts_move_to_the_device_and_back_with_the_same_bits(
    training: Callable[..., Training], monkeypatch: pytest.MonkeyPatch, states: str
) -> None:
    monkeypatch.setattr(state_formats, "LEAST_LOW_BIT", 100)
    plain, turned = training(states), training(states)
    plain.steps(10)
    planned, ways = turned.engine.memory(), set[tuple[str, str]]()
    for device_groups, resident in ((3, 0), (3, 2), (LAYERS + 3, 0), (1, 1), (0, 0)):
        turned.steps(2)
        settings = settings_with(
            turned.context, prefetch=2, resident_blocks=resident, device_groups=device_groups
        )
        turn(turned.engine, turned.context, settings)
        used, need = turned.engine.memory().device_by, turned.context.need(settings)
        assert (used["weights"], used["optimizer"]) == (need.weights_bytes, need.optimizer_bytes)
        assert used["gradients"] <= need.gradients_bytes
        letters = turned.engine.residency().optimizer
        assert letters == ("G" * max(0, device_groups - 1))[:LAYERS].ljust(LAYERS, "C")
        moves = [one for one in turned.engine.take_moves(999)[0] if one.cause == "placement"]
        ways.update((one.what, one.direction) for one in moves)
    assert ways == {(w, d) for w in ("weights", "state", "gradients") for d in ("C>G", "G>C")}
    assert turned.losses == plain.losses
    assert turned.steps(2) == plain.steps(2)
    assert all(torch.equal(a, b) for a, b in zip(turned.weights(), plain.weights(), strict=True))
    assert turned.engine.memory().device_by["weights"] == planned.device_by["weights"]


def test_no_room_for_a_part_leaves_every_part_where_it_was(
    training: Callable[[], Training], monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, run = training(), training()
    plain.steps(4)
    run.steps(2)
    before = run.engine.memory().device_by
    real, calls = GroupMemory.allocate, 0

    def scarce(self: GroupMemory, *args: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 5:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return real(self, *args, **options)

    monkeypatch.setattr(GroupMemory, "allocate", scarce)
    settings = settings_with(run.context, prefetch=1, resident_blocks=1, device_groups=3)
    with pytest.raises(DoesNotFit, match="find no room"):
        turn(run.engine, run.context, settings)
    assert run.engine.memory().device_by == before
    assert run.engine.plan.totals.device_groups == 0
    assert run.steps(2) == plain.losses


@pytest.mark.parametrize(
    ("family", "offload"),
    [
        ("llama", "weights"),
        pytest.param("qwen2", "weights", marks=pytest.mark.slow),
        ("qwen2", "max"),
    ],
)
def test_any_sequence_of_changes_keeps_the_bits(
    training: Callable[..., Training], family: str, offload: str
) -> None:
    """Also of a tied embedding, which two parts add to, and of boundaries that wait on the host."""
    dice = random.Random(f"{family} {offload}")
    plain, turned = (training(family=family, offload=offload) for _ in range(2))
    parts = len(turned.engine.groups)
    for _ in range(5):
        settings = settings_with(
            turned.context,
            prefetch=dice.randint(1, LAYERS),
            resident_blocks=dice.randint(0, LAYERS),
            device_groups=dice.choice([0, 0, dice.randint(0, parts)]),
            blocks_without_recompute=dice.choice([0, dice.randint(0, LAYERS)]),
        )
        turn(turned.engine, turned.context, settings)
        turned.steps(dice.randint(1, 2))
        need = turned.context.need(settings)
        assert turned.engine.memory().device_by["weights"] == need.weights_bytes
    assert turned.losses == plain.steps(len(turned.losses))
    assert all(torch.equal(a, b) for a, b in zip(turned.weights(), plain.weights(), strict=True))
