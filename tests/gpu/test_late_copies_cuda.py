"""On a GPU that is late no copy reaches memory that has become something else's."""

from __future__ import annotations

from concurrent.futures import Future

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import fluxtrain
from fluxtrain.core.device import page_locks
from fluxtrain.core.device.arena import HostArena
from fluxtrain.core.device.cuda_device import CudaDevice
from fluxtrain.core.memory.activation_offload import ActivationOffload
from fluxtrain.core.memory.window import Window

pytestmark = pytest.mark.gpu
SIZE = 32 << 20
LATE = 200_000_000  # clocks, some 0.1 s


def late_copy() -> tuple[CudaDevice, HostArena, Window]:
    """A copy of ones into a slot, which the GPU makes some time from now."""
    device = CudaDevice(torch.device("cuda"))
    window = Window(device, lambda *_: None)
    arena = HostArena(SIZE, pin=True)
    ones = arena.tensor(torch.uint8, SIZE, 0).fill_(1)
    slot = window.add_slot(SIZE)
    torch.cuda.synchronize()
    with torch.cuda.stream(device._up):
        torch.cuda._sleep(LATE)
    device.upload(slot.flat, ones, None, None)
    return device, arena, window


def test_memory_of_a_slot_that_is_gone_is_given_away_after_its_last_copy() -> None:
    device, arena, window = late_copy()
    del window
    fresh = torch.zeros(SIZE, dtype=torch.uint8, device="cuda")
    torch.cuda.synchronize()
    assert int(fresh.max()) == 0
    assert arena.size_bytes == SIZE
    device.close()


def test_an_arena_is_unlocked_after_its_last_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    device, arena, window = late_copy()
    last, made = torch.cuda.Event(), []
    last.record(device._up)
    unregister = page_locks.LOCKS._unregister

    def noted(address: int) -> None:
        made.append(last.query())
        unregister(address)

    monkeypatch.setattr(page_locks.LOCKS, "_unregister", noted)
    assert not last.query() and arena.pinned_bytes == SIZE
    del arena
    assert made == [True]
    assert int(window.slots[0].flat.min()) == 1
    device.close()


def test_a_copy_waits_for_its_update_and_the_computation_for_the_copy() -> None:
    device = CudaDevice(torch.device("cuda"))
    arena = HostArena(SIZE, pin=True)
    home = arena.tensor(torch.uint8, SIZE, 0)
    wire = device.for_copies(torch.zeros(SIZE, dtype=torch.uint8, device="cuda"))
    update: Future[None] = Future()
    transfer = device.upload(wire, home, update, device.mark())
    assert transfer.instants() is None and not transfer.done()
    home.fill_(7)
    with torch.cuda.stream(device._up):
        torch.cuda._sleep(LATE)
    update.set_result(None)
    transfer.wait_compute("weights")
    assert int(wire.min()) == 7
    device.close()


def test_memory_of_a_boundary_that_needs_no_way_back_is_kept_for_its_copy_home() -> None:
    device = CudaDevice(torch.device("cuda"))
    offload = ActivationOffload(device)
    tensor = torch.ones(SIZE, dtype=torch.uint8, device="cuda")
    address = tensor.data_ptr()
    torch.cuda.synchronize()
    with torch.cuda.stream(device._down):
        torch.cuda._sleep(LATE)
    offloaded = offload.offload([tensor], [True])[0]
    del tensor
    back = offload.fetch(offloaded)
    assert back.data_ptr() == address
    del back
    fresh = torch.zeros(SIZE, dtype=torch.uint8, device="cuda")
    assert fresh.data_ptr() == address
    torch.cuda.synchronize()
    assert int(offloaded.host.min()) == 1
    device.close()


def test_the_next_batch_may_be_written_over_a_page_locked_one_after_the_forward_pass() -> None:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        vocab_size=256, max_position_embeddings=64,
    )  # fmt: skip
    model = fluxtrain.wrap(LlamaForCausalLM(config).train(), device="cuda", cards=1, offload="none")
    first = torch.randint(0, 256, (4, 32))
    batch = torch.empty_like(first, pin_memory=True)
    losses = []
    for late in (0, 0, LATE):
        batch.copy_(first)
        torch.cuda._sleep(late)
        loss = model(input_ids=batch, labels=batch).loss
        batch.fill_(1)
        losses.append(float(loss.detach()))
    assert losses[2] == losses[1]
