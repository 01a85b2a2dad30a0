"""Host arenas and groups: exact sizes, own storages, nothing kept."""

from __future__ import annotations

import gc
import itertools
import subprocess
import sys
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from fluxtrain.core.device import page_locks
from fluxtrain.core.device.arena import ALIGNMENT_BYTES, HostArena, aligned
from fluxtrain.core.device.page_locks import PageLocks
from fluxtrain.core.memory.group import Group
from fluxtrain.errors import UnsupportedModel
from fluxtrain.plan.group_placement import GroupPlacement
from tests.engine.pages import made_bytes, made_bytes_at, mapped

CPU = torch.device("cpu")
MIB = 1 << 20


def test_an_arena_is_zero_and_its_tensors_share_memory_but_not_storages() -> None:
    arena = HostArena(4096, pin=False)
    whole = arena.tensor(torch.uint8, 4096, 0)
    first, second = arena.tensor(torch.float32, 8, 0), arena.tensor(torch.bfloat16, 16, 128)
    assert not whole.any()
    first.fill_(1.0)
    assert whole[:32].any() and not whole[32:].any()
    assert first.untyped_storage().nbytes() == 32
    assert second.untyped_storage().data_ptr() == second.data_ptr() == whole.data_ptr() + 128
    assert arena.pinned_bytes == 0


class Locks(PageLocks):
    """Grants one lock and refuses the next; `made` has the bytes with pages before each."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[int] = []

    def _register(self, address: int, size_bytes: int) -> bool:
        self.made.append(made_bytes_at(address, size_bytes))
        return len(self.made) == 1

    def _unregister(self, address: int) -> None:
        pass


def test_memory_is_made_before_it_is_locked_and_given_back_where_that_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    size, locks = 64 * MIB, Locks()
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    monkeypatch.setattr(page_locks, "LOCKS", locks)
    arena = HostArena(size, pin=True)
    assert arena.pinned_bytes == size and locks.made[0] > size // 2
    whole = arena.tensor(torch.uint8, size, 0)
    assert made_bytes(whole) == size and not whole.any()
    refused = HostArena(size, pin=True)
    assert refused.pinned_bytes == 0 and locks.made[1] > size // 2
    whole = refused.tensor(torch.uint8, size, 0)
    assert made_bytes(whole) == 0 and not whole[:: 1 << 16].any()
    again = HostArena(size, pin=True)  # nobody asks again
    assert again.pinned_bytes == 0 and len(locks.made) == 2


def test_a_fork_gets_weights_and_neither_states_nor_gradients() -> None:
    """Every step writes these: with a child that shares them it would copy them all."""
    group = placed((torch.bfloat16, (64, 64), True))
    group.memory.ensure_state()
    group.memory.ensure_gradient()
    (segment,) = group.segments
    held = {"weights": segment.weights, "m": segment.m, "gradient": segment.rounded}
    wiped = {name: "wf" in mapped(memory)[1] for name, memory in held.items() if memory is not None}
    assert wiped == {"weights": False, "m": True, "gradient": True}


def test_an_arena_lives_as_long_as_its_tensors_and_no_longer() -> None:
    size = 64 * MIB
    arena = HostArena(size, pin=False)
    tensor = arena.tensor(torch.uint8, size, 0)
    address = tensor.data_ptr()
    assert made_bytes_at(address, size) < size // 4  # untouched pages cost nothing
    tensor.fill_(7)
    assert made_bytes_at(address, size) == size
    del arena
    gc.collect()
    assert int(tensor[-1]) == 7
    del tensor
    assert made_bytes_at(address, size) < size // 4


def placed(*specs: tuple[torch.dtype, tuple[int, ...], bool]) -> Group:
    group = Group("block", "block")
    for i, (dtype, shape, trained) in enumerate(specs):
        values = torch.arange(1, 1 + torch.Size(shape).numel()).reshape(shape).to(dtype)
        group.add(nn.Parameter(values, requires_grad=trained), f"p{i}")
    group.place(GroupPlacement.on("host"), CPU, pin=False)
    return group


SPECS = st.lists(
    st.tuples(
        st.sampled_from([torch.bfloat16, torch.float32]),
        st.lists(st.integers(1, 9), max_size=3).map(tuple),
        st.booleans(),
    ),
    min_size=1,
    max_size=8,
)


@settings(max_examples=20, deadline=None)
@given(SPECS)
def test_a_group_lays_its_members_out_without_overlap_and_keeps_their_values(specs: Any) -> None:
    group = placed(*specs)
    spans = []
    for member, (dtype, shape, trained) in zip(group.members, specs, strict=True):
        home = group.memory.views[member.index]
        expected = torch.arange(1, 1 + torch.Size(shape).numel()).reshape(shape).to(dtype)
        assert torch.equal(home, expected) and home.dtype == dtype
        assert member.parameter.data_ptr() == home.data_ptr()
        start = group.memory.flat_weights.data_ptr()
        assert home.data_ptr() % ALIGNMENT_BYTES == start % ALIGNMENT_BYTES
        assert home.untyped_storage().nbytes() == home.nbytes
        assert member.trained == trained
        spans.append((home.data_ptr() - group.memory.flat_weights.data_ptr(), home.nbytes))
    spans.sort()
    assert all(a + n <= b for (a, n), (b, _) in itertools.pairwise(spans))
    assert spans[-1][0] + spans[-1][1] <= group.weight_bytes
    there = group.device_views(group.memory.flat_weights.clone())
    assert all(torch.equal(t, h) for t, h in zip(there, group.memory.views, strict=True))


def test_a_trained_bf16_parameter_costs_twelve_bytes_and_its_gradient_two() -> None:
    n = 1 << 16
    group = placed((torch.bfloat16, (n,), True))
    assert (group.weight_bytes, group.state_bytes, group.gradient_bytes) == (2 * n, 0, 0)
    group.memory.ensure_state()
    group.memory.ensure_gradient()
    assert (group.state_bytes, group.gradient_bytes) == (10 * n, 2 * n)
    frozen = placed((torch.bfloat16, (n,), False))
    frozen.memory.ensure_state()
    assert (frozen.weight_bytes, frozen.state_bytes) == (2 * n, 0)


def test_a_type_that_cannot_be_trained_is_refused_and_may_be_frozen() -> None:
    with pytest.raises(UnsupportedModel, match="float64"):
        placed((torch.float64, (3,), True))
    assert placed((torch.float64, (3,), False)).weight_bytes == aligned(24)


PEAK = """
import sys, torch, fluxtrain
from torch import nn
from fluxtrain.core.wrap.engine import engine_of

def value(key):
    lines = open("/proc/self/status").read().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key))

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(2048, 2048, dtype=torch.bfloat16) for _ in range(24))
    def forward(self, x):
        for block in self.blocks:
            x = x + block(x)
        return x

warm = fluxtrain.wrap(nn.Sequential(*(nn.Sequential(nn.Linear(8, 8)) for _ in range(2))))
warm(torch.ones(2, 8)).sum().backward()
torch.optim.AdamW(warm.parameters()).step()
empty = value("VmRSS")
model = fluxtrain.wrap(Model(), offload="max")
engine = engine_of(model)
wrapped = value("VmHWM") - empty
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for _ in range(2):
    model(torch.ones(4, 2048, dtype=torch.bfloat16)).float().square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
trained = value("VmHWM") - empty
slots = engine.memory().device_by
weights = engine.residency().weights_bytes
print(wrapped, weights, trained, engine.memory().host_arena_bytes, sum(slots.values()))
"""


@pytest.mark.slow
def test_the_hosts_peak_is_at_most_the_arenas_and_fifteen_percent() -> None:
    """A model of 192 MiB in bf16; on CPU the device's buffers are host memory on top."""
    done = subprocess.run(
        [sys.executable, "-c", PEAK], capture_output=True, text=True, check=True, timeout=240
    )
    wrapped, weights, trained, arenas, device = map(int, done.stdout.split())
    assert weights > 190 * MIB and arenas > 6.9 * weights
    assert wrapped <= 1.15 * weights + device
    assert trained <= 1.15 * arenas + device
