"""Memory for the copies of checkpoints: made ahead, slowly, and used again."""

from __future__ import annotations

import time
from typing import Any

import psutil
import pytest
import torch

from fluxtrain.config.cadence import Cadence
from fluxtrain.core.device.heap import give_back_spare, trim_heap
from fluxtrain.train.checkpoint import background
from fluxtrain.train.checkpoint.background import CopyMemory
from fluxtrain.train.observe.host_room import give_up_caches

MIB = 1 << 20


def used_bytes() -> int:
    return int(psutil.Process().memory_info().rss)


def made_ahead(memory: CopyMemory, size_bytes: int) -> None:
    memory.make_ahead()
    give_up_s = time.monotonic() + 30
    while memory.made_bytes < size_bytes and time.monotonic() < give_up_s:
        time.sleep(0.01)


def test_memory_is_taken_when_it_is_made_and_no_more_when_it_is_used() -> None:
    parts = [torch.ones(16 * MIB, dtype=torch.uint8) for _ in range(2)]
    before = used_bytes()
    memory = CopyMemory(128 * MIB)
    assert used_bytes() - before < 16 * MIB, "pages are made when they are first written"
    made_ahead(memory, 128 * MIB)
    made = used_bytes()
    assert made - before >= 120 * MIB
    for _ in range(3):
        memory.begin()
        for part in parts:
            memory.like(part).copy_(part)
    assert used_bytes() - made < 16 * MIB


def test_each_tensor_has_memory_of_its_own_and_later_ones_begin_anew() -> None:
    memory = CopyMemory(MIB)
    memory.begin()
    tensors = [
        torch.arange(n, dtype=kind) for n in (1, 7, 100) for kind in (torch.int8, torch.int64)
    ]
    tensors += [torch.zeros(0), torch.rand(3, 5, 2, generator=torch.Generator().manual_seed(1))]
    copies = []
    for tensor in tensors:
        copies.append(memory.like(tensor))
        copies[-1].copy_(tensor)
    for tensor, copy in zip(tensors, copies, strict=True):
        assert torch.equal(tensor, copy) and copy.is_contiguous() and copy.dtype == tensor.dtype
    memory.begin()
    assert memory.like(tensors[0]).data_ptr() == copies[0].data_ptr()


def test_a_checkpoint_that_comes_early_waits_for_no_page(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background, "SHARE", 1e-6)  # the pages would take hours
    memory = CopyMemory(256 * MIB)
    memory.make_ahead()
    started_s = time.monotonic()
    memory.begin()
    assert time.monotonic() - started_s < 5
    assert memory.made_bytes < 256 * MIB
    memory.make_ahead()  # of no use any more
    assert memory.made_bytes < 256 * MIB


def test_little_memory_takes_it_back_unless_copies_are_in_it() -> None:
    memory = CopyMemory(128 * MIB)
    made_ahead(memory, 128 * MIB)
    memory.begin()
    copy = memory.like(torch.ones(64 * MIB, dtype=torch.uint8)).fill_(7)
    trim_heap()  # what other tests left
    made = used_bytes()
    give_back_spare()
    assert used_bytes() > made - 16 * MIB
    assert int(copy.min()) == 7
    memory.end()
    del copy
    give_up_caches()
    assert used_bytes() < made - 100 * MIB
    memory.begin()
    part = torch.ones(8, dtype=torch.uint8)
    assert torch.equal(memory.like(part).copy_(part), part)


def test_a_limit_of_addresses_leaves_fresh_memory() -> None:
    memory = CopyMemory(1 << 60)
    memory.make_ahead()
    memory.begin()
    part = torch.ones(8)
    assert torch.equal(memory.like(part).copy_(part), part)


@pytest.mark.parametrize(
    ("every", "step", "passed_s", "nears"),
    [
        (10, 0, 0.0, True), (10, 89, 0.0, True), (10, 90, 0.0, False),  # the last is waited for
        ("end", 50, 1e6, False), ("auto", 4, 0.0, False), ("auto", 5, 0.0, True),
        ("auto", 1, 299.0, False), ("auto", 1, 300.0, True), ("auto", 100, 1e6, False),
    ],
)  # fmt: skip
def test_memory_is_made_when_a_checkpoint_nears(
    every: Any, step: int, passed_s: float, nears: bool
) -> None:
    now = [0.0]
    cadence = Cadence(
        every=every,
        total_steps=100,
        share=0.05,
        period_s=600.0,
        clock=lambda: now[0],  # type: ignore[arg-type]
    )
    now[0] = passed_s
    assert cadence.nears(step) == nears
