"""Page locks that are refused part-way: the rest is copied through a ring, with the same bits."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fluxtrain
from fluxtrain.core.device import page_locks
from fluxtrain.core.device.arena import HostArena, Staging, host_copy
from fluxtrain.core.device.page_locks import PageLocks
from fluxtrain.core.wrap.engine import engine_of
from fluxtrain.train.placing.preflight import page_locks_of
from tests.engine.granted import PinningDevice, pinning

KIB = 1 << 10


class FakeLocks(PageLocks):
    """A system that locks `grants` bytes and then says no."""

    def __init__(self, grants: int) -> None:
        super().__init__()
        self.grants = grants
        self.attempts = 0

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype)

    def _locked_by_torch(self, memory: Tensor) -> bool:
        """Answer as CUDA does, for the first byte."""
        first = memory.data_ptr()
        return any(start <= first < start + size for start, size in self._sizes.items())

    def _register(self, address: int, size_bytes: int) -> bool:
        self.attempts += 1
        return self.locked_bytes + size_bytes <= self.grants

    def _unregister(self, address: int) -> None:
        pass


@pytest.fixture
def system(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., FakeLocks]]:
    """`system(grants)`: the device locks its memory, and so much is granted."""
    monkeypatch.setattr(PinningDevice, "ring_bytes", 4 * KIB)  # many pieces a group

    def make(grants: int) -> FakeLocks:
        made = FakeLocks(grants)
        pinning(monkeypatch)
        monkeypatch.setattr(page_locks, "LOCKS", made)
        return made

    yield make
    gc.collect()  # arenas give their locks back to the system that granted them


def trained(model: nn.Module, inputs: dict[str, Tensor]) -> list[Any]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses: list[Any] = []
    for _ in range(4):
        loss = model(**inputs).loss
        loss.backward()
        losses.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


@pytest.mark.parametrize("offload", ["weights", "max"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("grants", [0, 20 * KIB, 130 * KIB, 1 << 30])
@pytest.mark.thinned(3)
def test_training_goes_on_with_the_same_bits_wherever_the_locks_end(
    grants: int,
    dtype: torch.dtype,
    offload: str,
    tiny: Any,
    batch: Any,
    system: Any,
    same: Any,
    weights: Any,
) -> None:
    plain = fluxtrain.wrap(tiny("llama", dtype), offload=offload, overlap=True)
    expected = trained(plain, batch())
    locks = system(grants)
    model = fluxtrain.wrap(tiny("llama", dtype), offload=offload, overlap=True)
    assert trained(model, batch()) == expected
    same(weights(model), weights(plain))
    assert (locks.refused_bytes == 0) == (grants == 1 << 30)
    assert locks.locked_bytes <= grants


def test_after_the_first_refusal_nobody_asks_again_and_it_is_said_once(
    tiny: Any, batch: Any, system: Any, caplog: Any
) -> None:
    locks = system(60 * KIB)
    model = fluxtrain.wrap(tiny("llama"), offload="weights")
    asked = locks.attempts
    trained(model, batch())
    assert locks.attempts == asked
    assert caplog.text.count("page-locked and") == 1
    assert "ulimit -l" in caplog.text
    del model
    for _ in range(100):  # a thread may hold the last arena until it has ended its work
        gc.collect()
        if locks.locked_bytes == 0:
            break
        time.sleep(0.1)
    assert locks.locked_bytes == 0 and locks.refused_bytes == 0, "the next model may ask"


def test_a_plan_tells_what_refused_locks_cost(tiny: Any, system: Any) -> None:
    locks = system(60 * KIB)
    model = fluxtrain.wrap(tiny("llama"), offload="weights")
    assert 0 < locks.locked_bytes <= 60 * KIB
    assert locks.refused_bytes > 0
    choice = page_locks_of(engine_of(model), {"h2d_pinned": 2e6, "h2d_pageable": 1e6})[0]
    assert "refuses" in choice.because and "more a step" in choice.because
    assert "1.00 MB/s instead of 2.00 MB/s" in choice.because


@pytest.mark.parametrize("size", [0, 1, 4095, 4096, 4097, 20_000])
@pytest.mark.parametrize("pieces", [1, 2, 3])
def test_the_ring_copies_every_byte_of_any_size(size: int, pieces: int, system: Any) -> None:
    """Copies that are late: a buffer is not written again before the copy from it has passed."""
    late: list[tuple[Tensor, Tensor]] = []

    def send(to: Tensor, source: Tensor) -> Callable[[], None]:
        late.append((to, source))

        def wait() -> None:
            while late:
                host_copy(*late.pop(0))

        return wait

    system(1 << 20)
    ring = Staging(4096, pieces)
    source = torch.randint(0, 255, (size,), dtype=torch.uint8)
    up, down = torch.zeros_like(source), torch.zeros_like(source)
    ring.upload(up, source, send)
    for passed in ring._arena.under_way.values():
        passed()
    assert torch.equal(up, source)
    ring.download(down, source, send)
    assert not late and torch.equal(down, source)


def test_of_an_arena_parts_are_locked_by_pages_and_let_go(system: Callable[..., FakeLocks]) -> None:
    locks = system(1 << 30)
    arena = HostArena(64 * KIB, pin=False)
    flat = arena.tensor(torch.uint8, 64 * KIB, 0)
    arena.lock_parts([flat[60 * KIB :], flat[: 5 * KIB], flat[6 * KIB : 7 * KIB]])
    assert locks.attempts == 2 and locks.locked_bytes == 12 * KIB  # two share a page
    assert locks.holds(flat[: 5 * KIB]) and locks.holds(flat[60 * KIB :])
    assert not locks.holds(flat) and not locks.holds(flat[20 * KIB : 21 * KIB])
    del arena, flat
    gc.collect()
    assert not locks.locked_bytes


def test_memory_that_is_locked_in_part_is_not_held(system: Callable[..., FakeLocks]) -> None:
    locks = system(64 * KIB)
    arena = HostArena(64 * KIB, pin=False)
    whole = arena.tensor(torch.uint8, 64 * KIB, 0)
    arena.lock_parts([whole[16 * KIB : 32 * KIB]])
    assert locks.holds(whole[16 * KIB : 32 * KIB]) and locks.holds(whole[20 * KIB : 24 * KIB])
    for start, stop in [(0, 64), (0, 20), (20, 40), (16, 33), (15, 32), (32, 64)]:
        assert not locks.holds(whole[start * KIB : stop * KIB]), (start, stop)
