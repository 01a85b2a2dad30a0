"""Homes of groups: what moves, beside updates and checkpoints, is neither lost nor overwritten."""

from __future__ import annotations

import itertools
import os
import random
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)
from torch import Tensor

from fluxtrain.core.device import cpu_device, disk, spill
from fluxtrain.core.gradients import host_gradients
from fluxtrain.core.memory.group import Group, prepare_move
from fluxtrain.core.memory.homes import Homes, IllegalMove
from fluxtrain.core.memory.states_on_disk import loaded
from fluxtrain.core.wrap.engine import engine_of
from fluxtrain.errors import DoesNotFit
from fluxtrain.plan.group_placement import GroupPlacement, Kind, Tier
from fluxtrain.train.live.apply_placement import apply_placement
from tests.engine.test_spill import SlowFile
from tests.engine.test_states_on_disk import ALSO, adamw, shards, train, wrapped

STEPS = 6
PLACES: list[dict[str, Tier]] = [
    {"weights": "device", "state": "device", "gradients": "device"},
    {"weights": "host", "state": "host", "gradients": "host"},
    {"weights": "host", "state": "disk", "gradients": "host"},
]


@cache
def in_memory() -> tuple[list[float], list[dict[str, Tensor]]]:
    """The losses of a training that moves nothing, and its states before each step."""
    model = wrapped(Path(tempfile.gettempdir()), "fp32", 0)
    optimizer, losses, states = adamw(model), list[float](), [shards(model)]
    for step in range(STEPS):
        losses += train(model, optimizer, range(step, step + 1))
        states.append(shards(model))
    return losses, states


class AllHomes(RuleBasedStateMachine):
    """A training in which groups move and checkpoints are read beside steps, while every copy takes
    its time, has the bits of one in memory."""

    def __init__(self) -> None:
        super().__init__()
        self.wanted = in_memory()
        self.folder, self.patch = tempfile.TemporaryDirectory(), pytest.MonkeyPatch()
        self.patch.setattr(spill, "RECORD_BYTES", 64 << 10)
        for module in (spill, disk):
            self.patch.setattr(module, "BLOCK_BYTES", 8 << 10)
        self.patch.setattr(host_gradients, "ring_depth", lambda _: 1)
        self.file = SlowFile()
        for name, way in (("preadv", self.file.read), ("pwritev", self.file.write)):
            real = getattr(os, name)
            self.patch.setattr(os, name, lambda *args, real=real, way=way: way(real, *args))
        pauses, copy = random.Random(5), cpu_device.host_copy

        def slowly(to: Tensor, source: Tensor) -> None:
            time.sleep(pauses.choice((0.0, 0.0, 0.001)))
            copy(to, source)

        self.patch.setattr(cpu_device, "host_copy", slowly)
        submit = spill.Spill.submit

        def late(self: spill.Spill, job: Callable[[], None]) -> Future[None]:
            def after_a_while() -> None:
                time.sleep(pauses.choice((0.0, 0.02)))
                job()

            return submit(self, after_a_while)

        self.patch.setattr(spill.Spill, "submit", late)
        self.step = 0
        self.read: tuple[threading.Thread, dict[str, Tensor], int] | None = None

    @initialize(also=st.sampled_from(ALSO), away=st.integers(0, 4))
    def begin(self, also: tuple[Kind, ...], away: int) -> None:
        self.model = wrapped(Path(self.folder.name), "fp32", away, also=also)
        self.engine, self.optimizer = engine_of(self.model), adamw(self.model)
        self.before = [group.placement for group in self.engine.groups]

    def fixed(self, group: Group) -> bool:
        """Whether gradients or trained weights of the group are on disk."""
        return group.is_on("disk") or group.is_on("disk", "gradients")

    @precondition(lambda self: self.step < STEPS)
    @rule()
    def train(self) -> None:
        loss = train(self.model, self.optimizer, range(self.step, self.step + 1))
        assert loss == self.wanted[0][self.step : self.step + 1]
        self.step += 1

    @rule(places=st.lists(st.sampled_from(PLACES), min_size=8, max_size=8))
    def move(self, places: list[dict[str, Any]]) -> None:
        self.end_read()
        rows = [
            group.placement if self.fixed(group) else replace(group.placement, **place)
            for group, place in zip(self.engine.groups, places, strict=False)
        ]
        apply_placement(self.engine, replace(self.engine.plan, groups=tuple(rows)))
        assert [group.placement for group in self.engine.groups] == rows

    @precondition(lambda self: self.read is None)
    @rule()
    def save_beside_the_next_step(self) -> None:
        found: dict[str, Tensor] = {}
        parts = list(self.engine.state_shards())
        copied: list[Future[None]] = []
        for group in self.engine.groups:
            group.jobs.saving = Future()
            copied.append(group.jobs.saving)

        def read() -> None:
            for (name, tensors), done in zip(parts, copied, strict=True):
                found.update({f"{name}/{key}": loaded(t).clone() for key, t in tensors.items()})
                done.set_result(None)

        self.read = threading.Thread(target=read), found, self.step
        with pytest.raises(IllegalMove, match="a checkpoint's copy is under way"):
            self.engine.groups[0].homes.refuse(
                self.engine.groups[0].placement, self.engine.groups[0].jobs.busy
            )
        self.read[0].start()

    def end_read(self) -> None:
        if self.read is not None:
            thread, found, step = self.read
            thread.join()
            self.read = None
            wanted = self.wanted[1][step]
            assert found.keys() == wanted.keys()
            assert all(torch.equal(tensor, wanted[name]) for name, tensor in found.items())

    @precondition(lambda self: self.step < STEPS)
    @rule(at=st.integers(0, 7), place=st.sampled_from(PLACES))
    def move_what_is_updated(self, at: int, place: dict[str, Any]) -> None:
        """A move beside an update is refused, and nothing changes."""
        self.end_read()
        self.engine.flush()
        goes_on = threading.Event()
        self.engine.updates._worker.submit(goes_on.wait)
        self.train()
        group = self.engine.groups[at % len(self.engine.groups)]
        row = replace(group.placement, **place)
        busy = bool(group.jobs.busy)
        if group.homes.leaving(row) and (busy or self.fixed(group)):
            with pytest.raises((IllegalMove, DoesNotFit)):
                prepare_move(group, row, pin=False)
        goes_on.set()

    @invariant()
    def no_bytes_overlap(self) -> None:
        if not hasattr(self, "engine"):
            return
        segments = [s for group in self.engine.groups for s in group.trained]
        held = [t for s in segments for t in (s.weights, s.rounded, s.lo, s.m, s.v)]
        memory = sorted((t.data_ptr(), t.nbytes) for t in held if t is not None)
        records = [p.record for s in segments if s.on_disk is not None for p in s.on_disk.pieces]
        places = sorted((record.start, record.size_bytes) for record in records)
        for ranges in (memory, places):
            for (start, size), (behind, _) in itertools.pairwise(ranges):
                assert start + size <= behind
        assert not self.file.overlaps

    def teardown(self) -> None:
        if hasattr(self, "engine"):
            self.end_read()
            found, wanted = shards(self.model), self.wanted[1][self.step]
            assert found.keys() == wanted.keys()
            assert all(torch.equal(tensor, wanted[name]) for name, tensor in found.items())
            self.engine.close()
        self.patch.undo()
        self.folder.cleanup()
        assert not self.file.overlaps


AllHomes.TestCase.settings = settings(
    max_examples=8, stateful_step_count=7, deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)  # fmt: skip
TestAllHomes = AllHomes.TestCase


def test_what_is_under_way_has_no_home() -> None:
    row = GroupPlacement(name="block")
    homes, away = Homes(row), replace(row, state="disk")
    with pytest.raises(IllegalMove, match="without a move"):
        homes.stays(away)
    with pytest.raises(IllegalMove, match="gradients move between device and host"):
        homes.refuse(replace(row, gradients="disk"), [])
    with homes.moving(away, []):
        homes.use("weights")
        assert homes.row == row
        with pytest.raises(IllegalMove, match="under way"):
            homes.use("state")
        with pytest.raises(IllegalMove, match="under way"):
            homes.refuse(replace(away, state="device"), [])
    assert homes.row == away
    with pytest.raises(OSError, match="lost"), homes.moving(row, []):
        raise OSError("lost")
    with pytest.raises(IllegalMove):
        homes.use("state")  # a mixture of two homes is none
