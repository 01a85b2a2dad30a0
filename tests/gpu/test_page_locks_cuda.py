"""Page locks that end part-way on a real GPU: the same bits, and no stale error."""

from __future__ import annotations

import copy
import os
import warnings
from typing import Any

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

import fluxtrain
from fluxtrain.core.device import page_locks
from fluxtrain.core.device.arena import HostArena
from fluxtrain.core.device.page_locks import PageLocks
from fluxtrain.core.wrap.engine import engine_of
from tests.engine.pages import mapped
from tests.wrap_with import wrap_with

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
MIB = 1 << 20


class Refusing(PageLocks):
    """CUDA itself refuses what is beyond `grants`: the range is no memory of this process."""

    def __init__(self, grants: int) -> None:
        super().__init__()
        self.grants = grants
        self.refusals = 0

    def _register(self, address: int, size_bytes: int) -> bool:
        fits = self.locked_bytes + size_bytes <= self.grants
        self.refusals += not fits
        return super()._register(address if fits else 4096, size_bytes)


def model() -> nn.Module:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=2048, hidden_size=1024, intermediate_size=4096, num_hidden_layers=6,
        num_attention_heads=8, num_key_value_heads=8,
    )  # fmt: skip
    return LlamaForCausalLM(config).to(torch.bfloat16)


def trained(plain: nn.Module, **options: Any) -> tuple[list[float], list[torch.Tensor], int]:
    wrapped = wrap_with(
        copy.deepcopy(plain), device="cuda", device_groups=0, resident_blocks=0, overlap=True,
        **options,
    )  # fmt: skip
    optimizer = torch.optim.AdamW(wrapped.parameters(), lr=1e-3)
    losses = []
    torch.manual_seed(1)
    for _ in range(5):
        ids = torch.randint(0, 2048, (4, 256))
        loss = wrapped(input_ids=ids, labels=ids).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(wrapped.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    pinned, counted = page_locks.LOCKS.locked_bytes, engine_of(wrapped).memory().host_pinned_bytes
    by_torch = torch.cuda.host_memory_stats()["allocated_bytes.current"]
    assert counted == pinned + by_torch and by_torch > 0
    weights = [parameter.detach().cpu().clone() for parameter in wrapped.parameters()]
    fluxtrain.unwrap(wrapped)
    return losses, weights, pinned


@pytest.fixture(autouse=True)
def deterministic() -> Any:
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("offload", ["weights", "max"])
@pytest.mark.parametrize("grants_mib", [33, 90, 150])
def test_training_goes_on_through_the_ring_with_the_same_bits(
    offload: str, grants_mib: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = model()
    losses, weights, pinned = trained(plain, offload=offload)
    locks = Refusing(grants_mib * MIB)
    monkeypatch.setattr(page_locks, "LOCKS", locks)
    again, others, locked = trained(plain, offload=offload)
    assert locks.refusals > 0
    assert locked < pinned
    assert again == losses
    assert all(torch.equal(a, b) for a, b in zip(weights, others, strict=True))


def test_a_refusal_leaves_no_error_behind() -> None:
    locks = Refusing(0)
    assert not locks.lock(4096, MIB)
    left = torch.ones(8, device="cuda") * 2
    torch.cuda.synchronize()
    assert left.sum().item() == 16.0


def test_the_device_reads_what_is_written_while_a_fork_lives() -> None:
    memory = (arena := HostArena(64 * MIB, pin=True)).tensor(torch.uint8, 64 * MIB, 0).fill_(1)
    assert arena.pinned_bytes == 64 * MIB
    assert "wf" in mapped(memory)[1]  # else some drivers copy it all to the child
    child_ends, parent_goes_on = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # threads: the child uses none
        child = os.fork()
    if child == 0:
        os.close(parent_goes_on)
        os.read(child_ends, 1)  # until the parent has closed it
        os._exit(0)
    memory.fill_(2)
    on_device = memory.to("cuda", non_blocking=True)
    torch.cuda.synchronize()
    os.close(parent_goes_on)
    os.close(child_ends)
    assert os.waitpid(child, 0)[1] == 0
    assert bool((on_device == 2).all())
