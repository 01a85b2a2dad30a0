"""Block inputs leave a device whose memory gets short, and the bits stay."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import fluxtrain
from fluxtrain.core.device.cpu_device import CpuDevice
from fluxtrain.core.memory.activation_offload import ActivationOffload
from fluxtrain.core.runtime.counters import CardCounts, HeldInputs
from fluxtrain.core.runtime.memory_watch import MemoryWatch
from fluxtrain.core.wrap.engine import engine_of
from tests.engine.test_block_room import ROWS, WIDTH, Block, Stack, limit_of, values

PLANNED, ROOM = 1_000, 1_100


class Shown(MemoryWatch):
    """A watch that is shown numbers in place of a GPU's."""

    used, left = 0, ROOM

    def _used_bytes(self) -> int:
        return self.used

    def _left_bytes(self) -> int:
        return self.left


class Inputs:
    """Inputs of one call, of 100 bytes."""

    def __init__(
        self, offload: ActivationOffload, counts: CardCounts, order: list[int], number: int
    ) -> None:
        self.evictable_bytes, self.number, self._order = 100, number, order
        self._held = HeldInputs(counts)
        self._held.add(100, 100)
        offload.keep(self)

    def evict(self, offload: ActivationOffload) -> None:
        self.evictable_bytes = 0
        self._held.add(-100, -100, 100)
        self._order.append(self.number)


def watched(count: int) -> tuple[Shown, list[Inputs], list[int]]:
    offload = ActivationOffload(CpuDevice())
    order: list[int] = []
    counts = CardCounts(torch.device("cpu"))
    watch = Shown(CpuDevice(), counts, offload, lambda _: None)
    return watch, [Inputs(offload, counts, order, number) for number in range(count)], order


def test_nothing_leaves_while_the_plan_holds() -> None:
    watch, _, order = watched(8)
    watch.look(PLANNED, None)
    watch.used = int(1.04 * PLANNED)  # above 90 % of what may be used, but below 105 % of the plan
    watch.after_block()
    assert order == []
    watch.look(PLANNED, 2 * PLANNED)
    watch.left, watch.used = 3 * PLANNED, int(1.2 * PLANNED)  # beyond the plan, but there is room
    watch.look(PLANNED, None)
    watch.after_block()
    assert order == []


def test_the_oldest_leave_where_another_program_takes_memory() -> None:
    watch, kept, order = watched(8)
    watch.left = PLANNED - 250
    watch.look(PLANNED, None)
    assert watch.lack_bytes == 250
    watch.after_block()
    assert order == [0, 1, 2]
    assert kept[3].evictable_bytes == 100


def test_a_peak_beyond_the_plan_lets_inputs_leave() -> None:
    watch, _, order = watched(8)
    watch.look(PLANNED, None)
    watch.used = 1_080
    watch.after_block()
    assert order == [0]  # 30 bytes above 105 % of the plan


def test_memory_that_ran_out_is_remembered_until_there_is_more() -> None:
    watch, kept, order = watched(8)
    watch.look(PLANNED, None)
    for expected in ([0, 1, 2], [0, 1, 2, 3, 4]):
        assert watch.ran_out()
        assert order == expected
    while watch.ran_out():
        pass
    assert len(order) == len(kept) and not watch.can_evict
    watch.left = 2 * ROOM
    watch.look(PLANNED, None)
    assert watch.lack_bytes < 0


def gradients(model: nn.Module, times: int = 1) -> list[dict[str, Tensor]]:
    found = []
    for _ in range(times):
        model.zero_grad()
        model(values()).backward()
        if hasattr(model, "_fluxtrain_engine"):
            engine_of(model).flush()
        found.append({n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None})
    return found


@pytest.mark.parametrize("way", ["forward", "backward"])
@pytest.mark.parametrize("how", ["", "dropout", "norm"])
def test_a_block_that_ran_out_is_computed_again_with_the_same_bits(how: str, way: str) -> None:
    def trained(times: int) -> tuple[list[dict[str, Tensor]], Any]:
        torch.manual_seed(3)
        model = Stack(how).train()
        fluxtrain.wrap(model, device="cpu", chunk_rows=8)
        engine_of(model).retries_blocks = False  # as in a trainer, which would redo the step
        limit = limit_of(model, 2)
        limit.times = times
        setattr(limit, way, 0)
        found = gradients(model, 2)
        assert limit.ran_out == times
        return found, engine_of(model)

    torch.use_deterministic_algorithms(True)
    try:
        (wanted, _), (found, engine) = trained(0), trained(2)
    finally:
        torch.use_deterministic_algorithms(False)
    assert engine.chunk_rows == 8, "no fewer rows at once: their sums would have other bits"
    assert engine.cards[0].activation_offload.offloaded_count >= 2
    assert engine.cards[0].counts.block_input_bytes == 0
    moves, _ = engine.counters.take_moves(99)
    left = [(move.block, move.bytes) for move in moves if move.cause == "evict"]
    assert left[0] == ("blocks.0", ROWS * WIDTH * 4)
    for one, other in zip(wanted, found, strict=True):
        assert one.keys() == other.keys()
        for name, gradient in one.items():
            assert torch.equal(gradient, other[name]), name


def test_a_graph_that_is_kept_runs_backward_twice_and_any_other_refuses() -> None:
    model = Stack()
    fluxtrain.wrap(model, device="cpu", chunk_rows=8)
    loss = model(values())
    loss.backward(retain_graph=True)
    loss.backward()
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


class Chain(nn.Module):
    """Blocks whose every input is watched."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.enter = nn.Linear(4, 16)
        self.blocks = nn.ModuleList(Block() for _ in range(depth))

    def forward(self, given: Tensor) -> Tensor:
        hidden, scale = self.enter(given), torch.ones(())
        for block in self.blocks:
            hidden = block(hidden, scale)
        mean: Tensor = hidden.square().mean()
        return mean


@settings(max_examples=15, deadline=None)
@given(evicted=st.lists(st.booleans(), min_size=6, max_size=6), offloaded=st.booleans())
def test_any_inputs_may_leave_after_any_block(evicted: list[bool], offloaded: bool) -> None:
    weights = []
    for leaving in (False, True):
        model = Chain(6)
        activations: Any = "host" if offloaded else "device"
        request = fluxtrain.PlacementRequest(offload="weights", activations=activations)
        fluxtrain.wrap(model, device="cpu", chunk_rows=4, placement=request)
        card = engine_of(model).cards[0]
        if leaving:
            turns, evict = iter(evicted * 10), card.activation_offload.evict
            card.watch.after_block = partial(lambda which, now: which(next(now)), evict, turns)  # type: ignore[method-assign]
        optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
        for _ in range(2):
            model(values()).backward()
            optimizer.step()
            optimizer.zero_grad()
        fluxtrain.sync(model)
        weights.append({n: p.detach().clone() for n, p in model.named_parameters()})
        counts = card.counts
        assert counts.block_input_bytes == counts.evictable_bytes == counts.evicted_bytes == 0
        fluxtrain.unwrap(model)
    for name, wanted in weights[0].items():
        assert torch.equal(wanted, weights[1][name]), name
