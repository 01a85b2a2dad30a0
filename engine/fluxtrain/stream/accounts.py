"""The engine's own accounting: bytes moved, bytes held, where each block is."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from fluxtrain.memory import page_locks
from fluxtrain.memory.device import Ticket
from fluxtrain.memory.group import Group
from fluxtrain.memory.rows import RowBuffers
from fluxtrain.plan.group_placement import Tier
from fluxtrain.stream.block_runs import runs_of
from fluxtrain.telemetry.events import BlockRun, Move

if TYPE_CHECKING:
    from fluxtrain.stream.engine import Engine

_KEPT_MOVES = 256
_HELD = ("allocated_bytes", "reserved_bytes")  # of torch's allocator
_Noted = tuple[int, str, str, int, str, str, Ticket]  # step, block, what, bytes, way, cause


@dataclass(frozen=True)
class BlockFacts:
    """One group as a screen shows it."""

    name: str
    kind: str  # block, edge
    weight_bytes: int
    parameters: int
    trained_parameters: int


@dataclass(frozen=True)
class Residency:
    """One letter a block: G device, C host, > on its way in, < on its way home, . nothing there."""

    weights: str
    gradients: str
    optimizer: str
    weights_bytes: int
    gradients_bytes: int
    optimizer_bytes: int
    blocks: tuple[BlockRun, ...] = ()


@dataclass(frozen=True)
class MemoryUse:
    """Bytes now; `device_by` partitions `device_used_bytes`. On CPU the device is the slots,
    buffers and boundary activations that a GPU would hold. What is page-locked is the process's,
    as its limits are: groups, rows, boundaries, staging, and torch's own."""

    device_total_bytes: int | None
    device_used_bytes: int
    device_peak_bytes: int
    device_budget_bytes: int | None
    device_by: dict[str, int]
    host_arena_bytes: int
    host_pinned_bytes: int


@dataclass(frozen=True)
class Traffic:
    """Bytes moved since the start, by direction."""

    h2d_bytes: int
    d2h_bytes: int


class Accounts:
    """Counters of one engine. Written by the computing thread, read by any."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.step = 0
        self.boundary_bytes = 0
        self.h2d_bytes = 0
        self.d2h_bytes = 0
        self._peak_bytes = 0
        self._earlier_peaks = 0, 0  # in use and reserved, before torch's peaks were measured anew
        self._moves: deque[_Noted] = deque(maxlen=_KEPT_MOVES)
        self._move_count = 0
        self._lock = threading.Lock()

    def uploaded(
        self, group: Group, cause: str, ticket: Ticket, size_bytes: int | None = None
    ) -> None:
        """A copy of the group's weights was started; None: of all of them."""
        size = group.wire_bytes if size_bytes is None else size_bytes
        self._engine.device.recorder.copied("h2d", "weights", group.name, ticket)
        with self._lock:
            self.h2d_bytes += size
            self._note(group, "weights", size, "C>G", cause, ticket)

    def downloaded(self, group: Group, ticket: Ticket, size_bytes: int) -> None:
        self._engine.device.recorder.copied("d2h", "gradients", group.name, ticket)
        with self._lock:
            self.d2h_bytes += size_bytes
            self._note(group, "gradients", size_bytes, "G>C", "gradient", ticket)

    def sum_uploaded(self, group: Group, ticket: Ticket, size_bytes: int) -> None:
        """Gradients of an earlier backward pass come up, to be added to."""
        self._engine.device.recorder.copied("h2d", "gradients", group.name, ticket)
        with self._lock:
            self.h2d_bytes += size_bytes
            self._note(group, "gradients", size_bytes, "C>G", "gradient", ticket)

    def traffic(self) -> Traffic:
        return Traffic(self.h2d_bytes, self.d2h_bytes)

    def take_moves(self, limit: int) -> tuple[list[Move], int]:
        """The latest moves that have ended (at most `limit`, oldest first), and how many were
        started since the beginning. One that is under way is given when it has ended."""
        with self._lock:
            ended: list[_Noted] = []
            under_way: list[_Noted] = []
            for noted in self._moves:
                ticket = noted[-1]
                (ended if ticket.done() or ticket.failed() else under_way).append(noted)
            self._moves = deque(under_way, maxlen=_KEPT_MOVES)
            taken, total = ended[-limit:], self._move_count
        return [
            Move(
                step=step, block=name, what=what, bytes=size, direction=way,
                duration_s=ticket.duration_s, cause=cause,
            )
            for step, name, what, size, way, cause, ticket in taken
        ], total  # fmt: skip

    def blocks(self) -> list[BlockFacts]:
        return [
            BlockFacts(g.name, g.kind, g.wire_bytes, g.count, g.trained_count)
            for g in self._engine.groups
        ]

    def residency(self) -> Residency:
        """Blocks only, in the model's order."""
        engine = self._engine
        blocks = [g for g in engine.groups if g.kind == "block"]
        return Residency(
            "".join(self._weights_letter(g) for g in blocks),
            "".join(self._gradient_letter(g) for g in blocks),
            "".join(_state_letter(g) for g in blocks),
            sum(g.wire_bytes for g in engine.groups),
            sum(g.gradient_bytes for g in engine.groups),
            sum(g.state_bytes for g in engine.groups),
            runs_of((g.name, g.wire_bytes, g.gradient_bytes, g.state_bytes) for g in blocks),
        )

    def memory(self) -> MemoryUse:
        engine = self._engine
        weights, gradients, states = _bytes_in("device", engine.groups)
        by = {
            "weights": self._copied_bytes() + weights,
            "gradients": engine.gradients.device_bytes + gradients,
            "optimizer": states,
            "activations": max(0, self.boundary_bytes),
            "workspace": 0,
            "cache": 0,
        }
        device = engine.device.torch_device
        total: int | None = None
        if device.type == "cuda":
            allocated, reserved = (held["current"] for held in _held_by_torch(device))
            by["workspace"] = max(0, allocated - sum(by.values()))
            by["cache"] = max(0, reserved - allocated)
            total = torch.cuda.get_device_properties(device).total_memory
            self._peak_bytes = self.device_peaks()[1]
        used = sum(by.values())
        self._peak_bytes = max(self._peak_bytes, used)
        return MemoryUse(
            total,
            used,
            self._peak_bytes,
            engine.plan.budget_bytes,
            by,
            sum(_bytes_in("host", engine.groups))
            + sum(rows.host_bytes for rows in self._row_buffers()),
            page_locks.LOCKS.held_bytes,
        )

    def _row_buffers(self) -> list[RowBuffers]:
        every = [group.rows for group in self._engine.groups]  # as in `_copied_bytes`
        return [rows for rows in every if rows is not None]

    def _copied_bytes(self) -> int:
        """Of the device, what weights from home are copied into."""
        rows = sum(rows.device_bytes for rows in self._row_buffers())
        heads = [u.slices for u in self._engine.units]  # another thread may give one up meanwhile
        slices = sum(head.device_bytes for head in heads if head is not None)
        return self._engine.window.size_bytes + rows + slices

    def device_peaks(self) -> tuple[int, int]:
        """The most bytes that tensors used on the GPU, and that were reserved for them, ever."""
        now_used, now_reserved = _held_by_torch(self._engine.device.torch_device)
        used, reserved = self._earlier_peaks
        return max(used, now_used["peak"]), max(reserved, now_reserved["peak"])

    def measure_peaks_anew(self) -> None:
        """torch's own peaks become those from now on; ours stay those of the whole run."""
        device = self._engine.device.torch_device
        if device.type == "cuda":
            self._earlier_peaks = self.device_peaks()
            torch.cuda.reset_peak_memory_stats(device)

    def sample(self) -> None:
        """Keep the peak of what is held (on CUDA the allocator keeps it)."""
        engine = self._engine
        if engine.device.torch_device.type != "cuda":
            at_device = sum(_bytes_in("device", engine.groups))
            held = self._copied_bytes() + engine.gradients.device_bytes + at_device
            self._peak_bytes = max(self._peak_bytes, held + self.boundary_bytes)

    def _note(
        self, group: Group, what: str, size: int, way: str, cause: str, ticket: Ticket
    ) -> None:
        self._moves.append((self.step, group.name, what, size, way, cause, ticket))
        self._move_count += 1

    def _weights_letter(self, group: Group) -> str:
        if group.placement.weights == "device":
            return "G"
        slot = self._engine.window.holds(group)
        if slot is None or slot.ticket is None:
            return "C"
        return "G" if slot.ticket.done() else ">"

    def _gradient_letter(self, group: Group) -> str:
        if self._engine.gradients.is_open(group):
            return "G"
        if not group.has_gradient:
            return "."
        arrival = self._engine.gradients.arrivals.get(group)
        if group.placement.gradients == "device":
            return "G"
        under_way = arrival is not None and not all(t.done() for t in arrival.tickets)
        return "<" if under_way else "C"


def _held_by_torch(device: torch.device) -> tuple[dict[str, int], dict[str, int]]:
    """Bytes (`current`, `peak`) that tensors use on the GPU, and that are reserved for them.

    `torch.cuda.memory_allocated` and its like each sort all numbers of the allocator for one of
    them, which would take the interpreter from the computation ten times a second.
    """
    numbers = torch.cuda.memory_stats_as_nested_dict(device)
    nothing = {"current": 0, "peak": 0}  # before the first use of the GPU
    used, reserved = (numbers.get(name, {}).get("all", nothing) for name in _HELD)
    return used, reserved


def _state_letter(group: Group) -> str:
    if not group.has_state:
        return "."
    return "G" if group.placement.state == "device" else "C"


def _bytes_in(tier: Tier, groups: Iterable[Group]) -> tuple[int, int, int]:
    """Bytes of weights, gradients and optimizer states that live in a tier."""
    there = [(g, g.placement) for g in groups]
    return (
        sum(g.wire_bytes for g, placed in there if placed.weights == tier),
        sum(g.gradient_bytes for g, placed in there if placed.gradients == tier),
        sum(g.state_bytes for g, placed in there if placed.state == tier),
    )


class Boundary:
    """Bytes held between a unit's forward and backward, for the accounts."""

    def __init__(self, accounts: Accounts, size_bytes: int) -> None:
        self._accounts, self._bytes = accounts, size_bytes
        accounts.boundary_bytes += size_bytes

    def close(self) -> None:
        self._accounts.boundary_bytes -= self._bytes
        self._bytes = 0

    def __del__(self) -> None:
        self.close()
