"""After its first steps a training asks the driver for no memory, neither the device's nor locked.

What counts: segments and driver calls of torch's device allocator (`segment.all.allocated`,
`num_device_alloc`, `num_device_free`, `num_alloc_retries` of `torch.cuda.memory_stats`), driver
calls of its allocator of page-locked memory (`num_host_alloc` of `torch.cuda.host_memory_stats`),
our own page locks, and host arenas. Memory that torch hands out again is not counted there.

Both of torch's allocators give a block out again only when the device has passed its last use on
another stream, so how many there are depends on how far the host runs ahead. In the warm-up the
device is held up at the start of some steps: then the host runs as far ahead as it ever will.
"""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch

from fluxtrain.core.device.arena import HostArena
from fluxtrain.core.device.page_locks import LOCKS
from fluxtrain.plan import heads
from tests.gpu.loops import STREAMED, VOCAB_CHUNK_BYTES, Training

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]

HELD_UP = range(6, 10)  # steps of the warm-up
FIRST, WINDOWS, WINDOW_STEPS = 13, 4, 4
LATE = 200_000_000  # clocks, some 0.1 s: longer than the host takes to queue a step
DEVICE = ("segment.all.allocated", "num_device_alloc", "num_device_free", "num_alloc_retries")
HOST = ("num_host_alloc",)
ON_HOST: dict[str, Any] = {**STREAMED, "activations": "host"}
IN_BACKWARD: dict[str, Any] = {"max_grad_norm": None, "optimizer_in_backward": True}


def present(stats: dict[str, Any], names: tuple[str, ...]) -> dict[str, int]:
    """The counters of these names that this version of torch has: one at least."""
    found = {name: int(stats[name]) for name in names if name in stats}
    assert found, f"none of {names} is counted"
    return found


def driver_calls() -> dict[str, int]:
    calls = present(torch.cuda.memory_stats(), DEVICE)
    if hasattr(torch.cuda, "host_memory_stats"):
        calls |= present(torch.cuda.host_memory_stats(), HOST)
    return calls


def forget_what_is_free() -> None:
    """What other tests left to torch's allocators would hide what this one asks for."""
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    release = getattr(torch._C, "_host_emptyCache", None)  # not of every build
    if release is not None:
        release()


class Watch:
    """Counts at the borders of windows of steps."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[dict[str, int]] = []  # of the driver
        self.locks: list[tuple[int, int]] = []  # bytes and ranges
        self.arenas: list[int] = []  # made so far
        self._made = 0
        make = HostArena.__init__

        def counted(arena: HostArena, size_bytes: int, **how: Any) -> None:
            self._made += 1
            make(arena, size_bytes, **how)

        monkeypatch.setattr(HostArena, "__init__", counted)

    def before_step(self, step: int) -> None:
        if step in HELD_UP:
            torch.cuda._sleep(LATE)
        if step == FIRST:
            gc.collect()  # what engines of other tests hold is not given up meanwhile
        if step >= FIRST and (step - FIRST) % WINDOW_STEPS == 0:
            self.note()

    def note(self) -> None:
        self.calls.append(driver_calls())
        self.locks.append((LOCKS.locked_bytes, len(LOCKS._sizes)))
        self.arenas.append(self._made)


@pytest.mark.parametrize(
    "placement",
    [
        ON_HOST,
        {**ON_HOST, **IN_BACKWARD},
        {**ON_HOST, "states": "8bit"},
        {**ON_HOST, **IN_BACKWARD, "states": "8bit"},
        {**ON_HOST, "deferred_moments": True},
        {**ON_HOST, "embedding": "rows"},
        {**ON_HOST, "head": "chunks"},
        {**ON_HOST, "tied": True, "embedding": "rows", "head": "chunks"},
        {**ON_HOST, "accumulation": 2},
        {**ON_HOST, "accumulation": 2, "tied": True, "embedding": "rows", "head": "chunks"},
        {"offload": "none", "accumulation": 2},
        {**ON_HOST, "documents": 4},
        {**STREAMED, "dtype": torch.float16},
        {
            "offload": "weights",
            "device_groups": 3,
            "resident_blocks": 1,
            "blocks_without_recompute": 2,
        },
        {"offload": "none"},
    ],
    ids=lambda placement: " ".join(f"{name}={value}" for name, value in placement.items()),
)
def test_later_steps_ask_the_driver_for_no_memory(
    placement: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One window of four may grow: a step may find the device further behind than any before it,
    and torch's allocators then take one more block. What every step asks for grows all four."""
    forget_what_is_free()
    monkeypatch.setattr(heads, "VOCAB_CHUNK_BYTES", VOCAB_CHUNK_BYTES)
    watch = Watch(monkeypatch)
    training = Training(FIRST + WINDOWS * WINDOW_STEPS, **placement)
    training.batches.before_step = watch.before_step
    assert watch._made > 0 or placement["offload"] == "none"
    training.run()
    assert len(watch.calls) == WINDOWS + 1
    assert len(set(watch.arenas)) == 1
    assert len(set(watch.locks)) == 1
    grown = [
        {name: after[name] - before[name] for name in after if after[name] != before[name]}
        for before, after in zip(watch.calls, watch.calls[1:], strict=False)
    ]
    assert grown.count({}) >= WINDOWS - 1, grown
