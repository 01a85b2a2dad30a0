"""Block inputs wait in page-locked buffers of their exact size on a real GPU, same bits."""

from __future__ import annotations

import copy
import gc
from collections.abc import Iterator

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import fluxtrain
from fluxtrain.core.device.cuda_device import CudaDevice
from fluxtrain.core.device.page_locks import LOCKS
from fluxtrain.core.memory.activation_offload import ActivationOffload
from fluxtrain.core.wrap.engine import engine_of
from tests.wrap_with import wrap_with

pytestmark = pytest.mark.gpu
SIZE = (24 << 20) + 4096  # no power of two
LATE = 200_000_000  # clocks, some 0.1 s


def model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=2048, hidden_size=768, intermediate_size=2048, num_hidden_layers=6,
        num_attention_heads=8, num_key_value_heads=8,
    )  # fmt: skip
    return LlamaForCausalLM(config).to(torch.bfloat16).train()


@pytest.fixture
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("deterministic")
def test_a_training_takes_exact_sizes_in_its_first_step_alone() -> None:
    plain, losses = model(), []
    for boundaries in ("device", "host"):
        wrapped = wrap_with(
            copy.deepcopy(plain), device="cuda", offload="weights", device_groups=0,
            resident_blocks=0, activations=boundaries, overlap=True,
        )  # fmt: skip
        optimizer = torch.optim.AdamW(wrapped.parameters(), lr=1e-3)
        torch.manual_seed(1)
        for step in range(4):
            ids = torch.randint(0, 2048, (6, 384), device="cuda")
            loss = wrapped(input_ids=ids, labels=ids).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(wrapped.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(loss.detach()))
            del loss
            free = engine_of(wrapped).cards[0].activation_offload._pool._free
            sizes = {size: len(buffers) for size, buffers in free.items()}
            assert sizes == ({6 * 384 * 768 * 2: 7} if boundaries == "host" else {})
            if step == 0:
                first = LOCKS.locked_bytes
            assert LOCKS.locked_bytes == first
        fluxtrain.unwrap(wrapped)
        del wrapped, optimizer
        gc.collect()
    assert losses[:4] == losses[4:]


def test_a_buffer_is_not_written_while_a_late_copy_that_nobody_waited_for_reads_it() -> None:
    """The computation that offloads the next input has waited for no copy of this buffer."""
    device = CudaDevice(torch.device("cuda"))
    offload = ActivationOffload(device)
    ones = torch.ones(SIZE, dtype=torch.uint8, device="cuda")
    gone = [offload.offload([ones.clone()], [True])[0] for _ in range(3)]
    torch.cuda.synchronize()
    offload.offload([], [])  # copies that were made are let go of
    with torch.cuda.stream(device._up):
        torch.cuda._sleep(LATE)
    with torch.cuda.stream(torch.cuda.Stream()):
        offload.fetch(gone[1])  # which starts to upload the one before it
    back, buffer = gone[0].on_device, gone[0].buffer
    assert back is not None and buffer is not None
    del gone[0]  # the others keep their buffers
    again = offload.offload([torch.full_like(ones, 2)], [True])[0]
    assert again.buffer is buffer
    torch.cuda.synchronize()
    assert int(back.min()) == int(back.max()) == 1
    assert int(again.host.min()) == 2
    device.close()
