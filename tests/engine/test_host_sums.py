"""Sums of several processes' gradients that the host adds."""

from __future__ import annotations

import mmap
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

import fluxtrain
from fluxtrain.core.gradients import host_gradients
from fluxtrain.core.gradients.gradients import FlatSum, MemberViews
from fluxtrain.core.gradients.host_sums import HostSums
from fluxtrain.core.ranks.join import Ranks
from fluxtrain.core.ranks.shares import Shares
from fluxtrain.core.wrap.engine import engine_of
from tests.engine.ranks import together
from tests.engine.test_ranks import Weights, share, trained
from tests.on_cards import llama

CPU = torch.device("cpu")


@dataclass
class Alone:
    """The memory of two ranks, of which the test is one and plays the other."""

    mates: Ranks = field(default_factory=lambda: Ranks(world=2, rank=1))
    may_go: threading.Event = field(default_factory=threading.Event)

    def take(self, size_bytes: int) -> mmap.mmap:
        return mmap.mmap(-1, size_bytes)

    def post(self, counter: int, count: int) -> None: ...

    def wait(self, counter: int, count: int) -> None:
        assert self.may_go.wait(60.0)


def test_a_sum_that_overflows_fp16_has_a_norm_that_says_so() -> None:
    engine = engine_of(fluxtrain.wrap(llama(2, dtype=torch.float16), device="cpu"))
    group = next(group for group in engine.groups if group.kind == "block")
    memory: Any = Alone()
    memory.may_go.set()
    group._shares = Shares(memory.mates, [CPU], lambda: None, memory)
    sums, host = HostSums([group], memory, engine.device, 1.0), engine.cards[0].gradients.host
    (segment,), mine = group.trained, torch.zeros(group.trained_elements)
    last = max(segment.members, key=lambda member: member.offset)
    at = last.offset + last.count - 1
    mine[at] = sums._sums[0][0][at] = 40000.0  # fp16 ends at 65504
    host.allocate(group, passing=False)
    _, arrival = sums.begin(group, mine, host, set())
    norms = arrival.measured()
    assert norms is not None
    assert segment.gradient[at].isinf() and norms[arrival.norm_of[last.index]].isinf()
    sums.close()


def test_a_sum_of_a_pass_that_broke_off_is_waited_for() -> None:
    """It would overwrite what the pass that is run again downloads first."""
    engine = engine_of(fluxtrain.wrap(llama(2), device="cpu"))
    group = next(group for group in engine.groups if group.kind == "block")
    memory: Any = Alone()
    group._shares = Shares(memory.mates, [CPU], lambda: None, memory)
    sums, host = HostSums([group], memory, engine.device, 1.0), engine.cards[0].gradients.host
    total = FlatSum(group, torch.ones(group.trained_elements), host, MemberViews())
    host.allocate(group, passing=False)
    total._sent, total._added = sums.begin(group, total.flat, host, set())
    threading.Timer(0.2, memory.may_go.set).start()
    total.abandon()
    assert memory.may_go.is_set() and bool((group.trained[0].gradient[-8:] == 1).all())
    sums.close()


def of_blocks(depth: int) -> Weights:
    """What is trained where the host has so many buffers for gradients of blocks."""
    with pytest.MonkeyPatch.context() as patch:
        share(patch, "full", on_host=True)
        patch.setattr(host_gradients, "ring_depth", lambda _: depth)
        return trained("bf16", "in_backward")


def of_large_and_small_blocks() -> tuple[Weights, Weights]:
    return of_blocks(1), of_blocks(3)


def test_blocks_with_one_buffer_for_their_gradients_wait_for_each_other(tmp_path: Path) -> None:
    for large, small in together(2, of_large_and_small_blocks, tmp_path):
        assert all(torch.equal(small[name], large[name]) for name in small)
