"""On a GPU the timed steps follow each other without a pause, which a fake card records."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import fluxtrain
from fluxtrain.core.wrap.block_discovery import take_apart
from fluxtrain.core.wrap.engine import Engine, engine_of
from fluxtrain.measure import block_timing as timing_module
from fluxtrain.measure.block_timing import STEPS, BlockTimer, BlockTimes
from fluxtrain.measure.small_model import ALL_CHECKED
from tests.engine.calibration_rows import batch_of


class Card:
    """What the host asked of it, in order: events are recorded at once, by the host's clock."""

    def __init__(self) -> None:
        self.log: list[str] = []
        card = self

        class Event:
            def __init__(self, *, enable_timing: bool) -> None:
                self.at_s = 0.0

            def record(self, _: object) -> None:
                self.at_s = time.perf_counter()

            def synchronize(self) -> None:
                card.log.append("waits for a step")

            def elapsed_time(self, later: Event) -> float:
                return (later.at_s - self.at_s) * 1e3

        self.patches: dict[str, Callable[..., Any]] = {
            "Event": Event,
            "current_stream": lambda _: None,
            "synchronize": lambda _: card.log.append("waits for all"),
            "memory_allocated": lambda _: 0,
            "max_memory_allocated": lambda _: 1 << 20,
            "reset_peak_memory_stats": lambda _: None,
        }


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> Card:
    found = Card()
    for name, what in found.patches.items():
        monkeypatch.setattr(torch.cuda, name, what)
    return found


@pytest.fixture
def timer(tiny: Any, card: Card) -> Iterator[tuple[BlockTimer, Engine]]:
    model: nn.Module = tiny("llama", torch.float32)
    fluxtrain.wrap(model, device="cpu", offload="none", chunk_rows=4)
    engine = engine_of(model)
    for unit in engine.units:
        unit.checked_recomputes = ALL_CHECKED
    blocks = [module for _, module in take_apart(model).blocks]
    made = BlockTimer(model, engine, blocks, torch.device("cpu"))
    made._on_gpu = True
    queue = made._queue

    def logged(inputs: dict[str, Any]) -> Any:
        card.log.append("queues")
        return queue(inputs)

    made._queue = logged  # type: ignore[method-assign]
    yield made, engine
    made.close()
    fluxtrain.unwrap(model)


def repeated(card: Card) -> list[str]:
    """The log of the steps that are not kept: from the first wait for all to the next."""
    first = card.log.index("waits for all") + 1
    return card.log[first : card.log.index("waits for all", first)]


def test_the_host_is_one_step_ahead_and_never_waits_for_the_card_to_run_dry(
    timer: tuple[BlockTimer, Engine], card: Card
) -> None:
    found = timer[0].measure(batch_of(4))
    assert card.log[:2] == ["queues", "waits for all"]  # the one that warms up
    steps = repeated(card)
    count = steps.count("queues")
    assert steps == ["queues", *["queues", "waits for a step"] * (count - 1)]
    assert 1 <= len(found.seconds["forward"]) <= STEPS
    assert found.keeps
    assert len(found.seconds["kept_backward"]) >= 1


def test_steps_before_the_card_is_hot_are_not_counted(
    timer: tuple[BlockTimer, Engine], card: Card, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a clock of which each step takes an eighth of a second."""
    clock = SimpleNamespace(perf_counter=lambda: card.log.count("queues") / 8)
    monkeypatch.setattr(timing_module, "time", clock)
    monkeypatch.setattr(timing_module, "HEAT_S", 4 / 8)
    monkeypatch.setattr(timing_module, "LIMIT_S", 2 / 8)
    found: BlockTimes = timer[0].measure(batch_of(4))
    assert repeated(card).count("queues") == 3 + 4
    assert len(found.seconds["forward"]) == 4  # from the one that begins as the heat is there
