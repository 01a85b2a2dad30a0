"""Block inputs wait in page-locked host buffers of their exact size, used again every step."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import fluxtrain
from fluxtrain.core.device.cpu_device import CpuDevice
from fluxtrain.core.memory.activation_offload import ActivationOffload, PinnedPool
from fluxtrain.core.wrap.engine import engine_of
from tests.engine.granted import Granted, PinningDevice, granting
from tests.wrap_with import wrap_with


@pytest.fixture
def locks(monkeypatch: pytest.MonkeyPatch) -> Iterator[Granted]:
    yield from granting(monkeypatch)


@pytest.fixture
def device(locks: Granted) -> Iterator[CpuDevice]:
    one = PinningDevice()
    yield one
    one.close()


def numbers(count: int, value: float) -> Tensor:
    return torch.full((count,), value)


def test_a_buffer_has_the_exact_size_and_serves_again(device: CpuDevice, locks: Granted) -> None:
    offload, others, attempts = ActivationOffload(device), locks.locked_bytes, locks.attempts
    for step in range(3):
        count = 3000  # 12,000 bytes, no power of two
        gone = [offload.offload([numbers(count, 10.0 * step + at)], [True])[0] for at in range(5)]
        assert locks.locked_bytes - others == 5 * 12_000
        for at in reversed(range(5)):
            assert bool((offload.fetch(gone[at]) == 10.0 * step + at).all())
        gone.clear()
    assert locks.attempts - attempts == 5


def test_what_was_never_fetched_is_waited_for_before_its_memory_serves_again(
    locks: Granted,
) -> None:
    class Late:
        waited = False

        def wait_host(self) -> None:
            self.waited = True
            raise RuntimeError("the copy was never made")

    copy: Any = Late()
    pool = PinnedPool()
    buffer = pool.take(64)
    buffer.unawaited = copy
    pool.give_back(buffer)
    assert pool.take(64) is buffer
    assert copy.waited and buffer.unawaited is None


def test_a_thread_that_copies_may_give_memory_back_while_its_copy_is_waited_for(
    locks: Granted,
) -> None:
    """The collector frees what it finds on any thread, on that of the copies too."""
    pool = PinnedPool()
    small, other = pool.take(1000), pool.take(1000)

    class Late:
        in_time = False

        def wait_host(self) -> None:
            thread = threading.Thread(target=pool.give_back, args=(other,), daemon=True)
            thread.start()
            thread.join(5)
            self.in_time = not thread.is_alive()

    copy = Late()
    small.under_way["d2h"] = copy.wait_host
    pool.give_back(small)
    del small
    pool.take(2000)
    assert copy.in_time


def test_sizes_that_differ_do_not_pile_up(locks: Granted) -> None:
    """Batches as long as their longest row: never more buffers than offloaded inputs at a time."""
    pool = PinnedPool()
    for size in (1000, 900, 1100, 1300, 700, 1376, 1900):
        held = [pool.take(size) for _ in range(4)]
        assert all(buffer.size_bytes >= size for buffer in held)
        for buffer in held:
            pool.give_back(buffer)
        del held, buffer
    assert locks.locked_bytes <= 4 * 2150  # a quarter more than what was too small, each time
    assert locks.attempts == 4 * 4  # 1000, 1250, 1562 and 1953 bytes


def test_a_training_takes_memory_in_its_first_step_alone(
    tiny: Any, batch: Any, locks: Granted
) -> None:
    weights: list[dict[str, Tensor]] = []
    for boundaries in ("device", "host"):
        model = tiny("llama", torch.bfloat16, num_hidden_layers=4)
        wrap_with(model, offload="weights", activations=boundaries, chunk_rows=2)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        seen: list[tuple[int, int]] = []
        for seed in range(3):
            model(**batch(seed=seed)).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            seen.append((locks.attempts, locks.locked_bytes))
        assert seen[1] == seen[2] == seen[0]
        engine_of(model).flush()
        weights.append({name: p.detach().clone() for name, p in model.named_parameters()})
        fluxtrain.unwrap(model)
    for name, weight in weights[0].items():
        assert torch.equal(weight, weights[1][name]), name


def test_the_gauge_counts_every_locked_byte_wherever_boundaries_wait(
    tiny: Any, batch: Any, locks: Granted, monkeypatch: pytest.MonkeyPatch
) -> None:
    by_torch = 12_345
    monkeypatch.setattr(locks, "_torch_bytes", lambda: by_torch)
    model = tiny("llama", torch.bfloat16, num_hidden_layers=4)
    wrap_with(model, offload="weights", activations="host", device_groups=0)
    engine = engine_of(model)
    loss = model(**batch()).loss
    counted = [engine.memory().host_pinned_bytes]
    assert counted == [by_torch + sum(locks._sizes.values())]
    loss.backward()
    del loss  # buffers of offloaded inputs are free, and stay; gradients have memory now
    counted.append(engine.memory().host_pinned_bytes)
    assert counted[1] == by_torch + sum(locks._sizes.values())
    boundaries = sum(
        size * len(free) for size, free in engine.cards[0].activation_offload._pool._free.items()
    )
    engine.cards[0].activation_offload.give_back()
    assert boundaries > 0
    assert engine.memory().host_pinned_bytes == counted[1] - boundaries
