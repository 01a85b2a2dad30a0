"""Locked memory stays so until copies from and to it are made, whatever the collector's order."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from fluxtrain.core.device.arena import HostArena, Staging
from fluxtrain.core.device.cpu_device import CpuDevice
from fluxtrain.core.device.device import Transfer
from fluxtrain.core.device.page_locks import PageLocks
from fluxtrain.core.device.worker import Worker
from fluxtrain.core.wrap.engine import engine_of
from tests.engine.granted import Granted, PinningDevice, granting
from tests.wrap_with import wrap_with

COUNT = 1000


@pytest.fixture
def locks(monkeypatch: pytest.MonkeyPatch) -> Iterator[Granted]:
    yield from granting(monkeypatch)


@pytest.fixture
def device(locks: Granted) -> Iterator[CpuDevice]:
    one = PinningDevice()
    yield one
    one.close()


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Worker], threading.Event]]:
    """`held(worker)`: its jobs wait for 0.3 s; the event tells that they go on."""
    timers: list[threading.Timer] = []

    def hold(worker: Worker) -> threading.Event:
        goes_on = threading.Event()
        worker.submit(goes_on.wait)
        timers.append(threading.Timer(0.3, goes_on.set))
        timers[-1].start()
        return goes_on

    gc.disable()
    yield hold
    gc.enable()
    for timer in timers:
        timer.join()


def unlocked_early(
    locks: Granted, monkeypatch: pytest.MonkeyPatch, made: Callable[[], bool]
) -> dict[int, bool]:
    """By address, in time: was it unlocked before `made` was true?"""
    early: dict[int, bool] = {}
    monkeypatch.setattr(locks, "_unregister", lambda at: early.update({at: not made()}))
    return early


def begin(device: CpuDevice, home: Tensor, way: str, after: Any = None) -> Transfer:
    other = torch.ones(home.numel(), dtype=home.dtype)
    return device.download(home, other) if way == "d2h" else device.upload(other, home, after, None)


@pytest.mark.parametrize("way", ["h2d", "d2h"])
def test_an_arena_is_unlocked_after_its_copies_when_a_collection_finds_all_at_once(
    way: str, device: CpuDevice, locks: Granted, monkeypatch: pytest.MonkeyPatch, held: Any
) -> None:
    arena = HostArena(4 * COUNT, pin=True)
    held(device._up if way == "h2d" else device._down)
    transfer = begin(device, arena.tensor(torch.float32, COUNT, 0), way)
    early = unlocked_early(locks, monkeypatch, transfer.done)
    address, everything = arena.address, [arena]
    everything.append(everything)  # type: ignore[arg-type]  # only a collection frees it
    del arena, everything
    gc.collect()
    assert early == {address: False}


def test_weights_stay_locked_while_they_are_copied_though_their_model_is_gone(
    tiny: Any, locks: Granted, monkeypatch: pytest.MonkeyPatch, held: Any
) -> None:
    model = wrap_with(tiny("llama", num_hidden_layers=4), offload="weights", device_groups=0)
    engine = engine_of(model)
    engine.cards[0].window.drain()
    group = next(g for g in engine.groups if g.placement.weights == "host" and g.kind == "block")
    group.weights_changed(frozen=True)
    worker = engine.device._up  # type: ignore[attr-defined]  # which ends with the model
    held(worker)
    assert engine.cards[0].window.prefetch(group)
    slot = engine.cards[0].window.holds(group)
    assert slot is not None and slot.transfer is not None and not slot.transfer.done()
    early = unlocked_early(locks, monkeypatch, slot.transfer.done)
    assert group.memory.flat_weights is not None
    address = group.memory.flat_weights.data_ptr()
    assert address in locks._sizes
    del model, engine, group, slot
    gc.collect()
    assert early[address] is False
    assert locks.locked_bytes == 0


@pytest.mark.parametrize("way", ["h2d", "d2h"])
def test_a_ring_that_is_dropped_waits_for_the_pieces_that_cross(
    way: str, locks: Granted, monkeypatch: pytest.MonkeyPatch
) -> None:
    crossed: list[int] = []

    def send(to: Tensor, source: Tensor) -> Callable[[], None]:
        number = sent[0] = sent[0] + 1

        def wait() -> None:
            if number == breaks:
                raise InterruptedError
            crossed.append(number)

        return wait

    sent, breaks = [0], 1 if way == "d2h" else 0
    ring = Staging(4096, 2)
    memory = torch.zeros(3 * 4096, dtype=torch.uint8)
    if way == "h2d":
        ring.upload(memory, torch.ones_like(memory), send)
    else:
        with pytest.raises(InterruptedError):
            ring.download(memory, torch.ones_like(memory), send)
    crosses = set(range(1, sent[0] + 1)) - set(crossed) - {breaks}
    assert crosses
    early = unlocked_early(locks, monkeypatch, lambda: crosses <= set(crossed))
    address, everything = ring._arena.address, [ring]
    everything.append(everything)  # type: ignore[arg-type]  # only a collection frees it
    del ring, everything
    gc.collect()
    assert early == {address: False}


def test_locks_keep_no_arena(locks: Granted) -> None:
    arena = HostArena(4096, pin=True)
    whole, within = (arena.tensor(torch.uint8, 1, offset) for offset in (0, 4095))
    assert locks.arena_of(whole) is arena and locks.arena_of(within) is arena
    assert locks.arena_of(torch.zeros(1)) is None
    assert isinstance(locks, PageLocks) and locks.lock(4096, 4096)  # of no arena
    del arena
    assert locks.arena_of(within) is None
    locks.unlock(4096)
    assert locks.locked_bytes == 0
