"""Some blocks at home on the host take a few whole steps, as a training's do, on a GPU's machine.

What is timed by itself is faster than in a training. There AdamW shares the host's memory with
copies and its cores with the threads that queue the GPU's work; those wait for a core, for memory
and for Python's lock; and between two blocks' updates a thread has to be woken. So a miniature with
all its blocks at home is trained: without an optimizer, its boundaries on the device and on the
host, and as the run will, with each block's
update at once and in two passes, or in steps in backward. Each takes a few steps of few rows, for
neither
AdamW nor the queueing depends on how many there are, and the GPU is then never what they wait for.
There are as many blocks as it takes for what comes home, and is updated soon, to be no large part
of the processor's cache.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import fmean
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from fluxtrain.block.recompute_policy import choose_recompute
from fluxtrain.calibration.block_timing import give_back
from fluxtrain.calibration.small_model import middle_block, miniature, wrapped
from fluxtrain.device.recorder import Note
from fluxtrain.errors import Diverged
from fluxtrain.methods.objective import BoundBatch
from fluxtrain.plan.cost.calibration import NotRehearsed, median
from fluxtrain.plan.facts import GroupFacts
from fluxtrain.plan.request import PlacementRequest
from fluxtrain.plan.states import StateFormat
from fluxtrain.units import bytes_text
from fluxtrain.wrapping.block_discovery import take_apart
from fluxtrain.wrapping.grouping import facts_of

if TYPE_CHECKING:
    from fluxtrain.wrapping.engine import Engine

PARAMETERS = 480 << 20  # of all blocks: the gradients of few would still be in a large cache
LEAST_BLOCKS, MOST_BLOCKS = 3, 12
BYTES_A_PARAMETER = 16  # at home: weight, masters, moments and gradient
HOST_SHARE = 4  # no more than this part of what is available
WARMING = 2  # steps: the first touches weights and gradients, the second the moments
REPEATS = 4
LIMIT_S = 0.8  # for the repeats of one kind; the last may end later

_SIZE = r"[\d.]+ (?:[KMGT]iB|bytes)"
Kind = Literal["alone", "parked", "whole", "passes", "in_backward"]


@dataclass(frozen=True, kw_only=True)
class Rehearsed:
    """What one kind of steps takes for each block."""

    forward_s: float  # the host queues one block's forward pass, less what it waits for
    backward_s: float
    optimizer_s: float  # the host, for each block: `step()` and forgetting its gradients
    update_s: float | None  # AdamW from one block's beginning to the next one's; None: none ran
    moments_s: float | None


def rehearse(
    model: nn.Module,
    batch: BoundBatch[Any],
    device: torch.device,
    states: StateFormat,
    host_available_bytes: int | None,
    *,
    in_backward: bool,
) -> tuple[dict[Kind, Rehearsed], GroupFacts] | NotRehearsed:
    """What each kind of steps takes that an `in_backward` run, or one that clips, can make, and
    the facts
    of the block that took it; or why there are none: device or host have too little memory, no
    block is trained, or copies of one give a loss or gradients that are not finite."""
    tried = middle_block(model)
    parameters = sum(p.numel() for p in tried.parameters())
    if not any(p.requires_grad for p in tried.parameters()):
        return NotRehearsed(why="no parameter of its blocks is trained", lasts=True)
    count = _blocks_for(parameters, host_available_bytes)
    if isinstance(count, NotRehearsed):
        return count
    try:
        return _rehearsed(model, count, batch, device, states, in_backward=in_backward)
    except (torch.OutOfMemoryError, MemoryError, Diverged) as error:
        return NotRehearsed(why=f"{count} copies of a block failed: {_why(error)}")
    finally:
        give_back(device)


def _rehearsed(
    model: nn.Module,
    count: int,
    batch: BoundBatch[Any],
    device: torch.device,
    states: StateFormat,
    *,
    in_backward: bool,
) -> tuple[dict[Kind, Rehearsed], GroupFacts]:
    home = torch.device("cpu")
    mini = miniature(model, count, blocks=home, edges=home).train()
    blocks = [module for _, module in take_apart(mini).blocks]
    within = {id(p) for module in blocks for p in module.parameters()}
    for parameter in mini.parameters():
        if id(parameter) not in within:
            parameter.requires_grad_(False)  # edges have their own part in a plan
    facts = next(group for group in facts_of(mini, states).groups if group.kind == "block")
    rows = batch.rows
    at_home = PlacementRequest(device_groups=0, resident_blocks=0, embedding="whole")
    how: dict[str, Any] = {"placement": at_home, "states": states, "deferred_moments": True}
    with wrapped(mini, device, "weights", rows, **how) as engine:
        stage = _Stage(mini, engine, blocks, batch, device)
        kinds: list[Kind] = ["alone", "parked", "in_backward" if in_backward else "whole"]
        kinds += ["passes"] if facts.pass_bytes and not in_backward else []
        return {kind: stage.play(kind) for kind in kinds}, facts


def _blocks_for(parameters: int, available_bytes: int | None) -> int | NotRehearsed:
    """How many blocks of so many parameters."""
    count = max(LEAST_BLOCKS, min(MOST_BLOCKS, -(-PARAMETERS // max(1, parameters))))
    if available_bytes is None:
        return count
    one_bytes = BYTES_A_PARAMETER * max(1, parameters)
    fitting = available_bytes // HOST_SHARE // one_bytes
    if fitting >= LEAST_BLOCKS:
        return min(count, fitting)
    least_bytes = LEAST_BLOCKS * one_bytes
    why = (
        f"{LEAST_BLOCKS} blocks take {bytes_text(least_bytes)} and may take 1/{HOST_SHARE} of the "
        f"{bytes_text(available_bytes)} of host memory that is free"
    )
    return NotRehearsed(why=why, host_bytes=HOST_SHARE * least_bytes)


def _why(error: Exception) -> str:
    """What failed, with the numbers of torch's long message where there was no memory."""
    text = str(error).partition("\n")[0] or type(error).__name__
    asked = re.search(rf"Tried to allocate ({_SIZE})", text)
    if asked is None:
        return text
    allowed = re.search(rf"({_SIZE}) allowed", text)  # by `placement.budget_gib`
    free = re.search(rf"of which ({_SIZE}) is free", text)
    room = f" of the {allowed[1]} allowed" if allowed else f"; {free[1]} is free" if free else ""
    return f"the GPU had no {asked[1]} left{room}"


@dataclass
class _Seen:
    """One kind's steps: host times, in the order of their occurrence."""

    forwards: list[list[float]] = field(default_factory=list)  # when each block was entered
    backwards: list[list[float]] = field(default_factory=list)
    optimizer_s: list[float] = field(default_factory=list)


class _Stage:
    """Where the steps of every kind are made."""

    def __init__(
        self,
        mini: nn.Module,
        engine: Engine,
        blocks: Sequence[nn.Module],
        batch: BoundBatch[Any],
        device: torch.device,
    ) -> None:
        self._mini, self._engine, self._blocks = mini, engine, blocks
        self._batch = batch.to(device)
        self._recorder = engine.device.recorder
        self._optimizer = torch.optim.AdamW([p for p in mini.parameters() if p.requires_grad], 1e-6)
        self._seen = _Seen()
        for block in blocks:
            block.register_forward_pre_hook(self._enters)
            block.register_forward_hook(self._leaves)
        for _ in range(WARMING):
            self._step("whole")

    def play(self, kind: Kind) -> Rehearsed:
        """Some steps of a kind behind one that does not count."""
        engine = self._engine
        engine.updates.defers_moments = kind == "passes"
        parked = kind == "parked"
        engine.plan = engine.plan.with_activations(
            "inputs_on_host" if parked else "inputs_on_device"
        )
        choose_recompute(engine)
        self._step(kind)
        self._engine.flush()
        self._seen = _Seen()
        self._recorder.notes.clear()
        started_s = time.perf_counter()
        for number in range(REPEATS):
            self._recorder.begin_step(number + 1)
            self._step(kind)
            if number and time.perf_counter() - started_s > LIMIT_S:
                break
        self._engine.flush()
        for group in self._engine.groups:
            group.wait()
        self._recorder.end_step()
        notes = [note for note in self._recorder.notes if isinstance(note, Note)]
        self._recorder.notes.clear()
        return self._told(kind, notes)

    def _step(self, kind: Kind) -> None:
        self._seen.forwards.append([])
        self._seen.backwards.append([])
        loss = self._batch.loss(self._mini)
        if kind == "in_backward":
            self._engine.begin_step_in_backward(self._optimizer, loss)
        loss.backward()
        updates = kind not in ("alone", "parked")
        if updates:
            self._engine.clip_grad_norm(None if kind == "in_backward" else 1.0, [loss.detach()])
        started_s = time.perf_counter()
        if updates:
            self._optimizer.step()
        self._engine.forget_gradients()
        self._seen.optimizer_s.append(time.perf_counter() - started_s)

    def _told(self, kind: Kind, notes: Iterable[Note]) -> Rehearsed:
        by_kind: dict[str, list[tuple[float, float]]] = {}
        for note in notes:
            if isinstance(note.start, float) and isinstance(note.stop, float):
                name = note.kind if note.lane == "cpu" else note.lane
                by_kind.setdefault(name, []).append((note.start, note.stop))
        waits, count = [*by_kind.get("host", []), *by_kind.get("stall", [])], len(self._blocks)
        return Rehearsed(
            forward_s=_between(self._seen.forwards, waits),
            backward_s=_between(self._seen.backwards, waits),
            optimizer_s=median(self._seen.optimizer_s) / count,
            update_s=_one_to_next(by_kind.get("update", []), count, waits=kind == "in_backward"),
            moments_s=_one_to_next(by_kind.get("moments", []), count, waits=False),
        )

    def _enters(self, *_: object) -> None:
        self._seen.forwards[-1].append(time.perf_counter())

    def _leaves(self, _: nn.Module, __: object, out: object) -> None:
        hidden = out[0] if isinstance(out, tuple) else out
        if isinstance(hidden, Tensor) and hidden.requires_grad:
            hidden.register_hook(self._backward_enters)

    def _backward_enters(self, _: Tensor) -> None:
        self._seen.backwards[-1].append(time.perf_counter())


def _between(steps: Iterable[Sequence[float]], waits: Sequence[tuple[float, float]]) -> float:
    """The median from one mark to the next of its step, less the waiting in between."""
    found = [
        after - before - sum(max(0.0, min(after, b) - max(before, a)) for a, b in waits)
        for marks in steps
        for before, after in pairwise(marks)
    ]
    return max(0.0, median(found)) if found else 0.0


def _one_to_next(
    intervals: Iterable[tuple[float, float]], blocks: int, *, waits: bool
) -> float | None:
    """Seconds of one interval and of what follows it until the next, of `blocks` a step. `waits`:
    also for gradients, which is no part of it; then the shorter half of the pauses counts."""
    ordered = sorted(intervals)
    if not ordered:
        return None
    pauses_s = sorted(
        max(0.0, after[0] - before[1])
        for number, (before, after) in enumerate(pairwise(ordered), 1)
        if number % blocks
    )
    if waits:
        pauses_s = pauses_s[: max(1, len(pauses_s) // 2)]
    lasting_s = fmean(stop - start for start, stop in ordered)
    return lasting_s + (fmean(pauses_s) if pauses_s else 0.0)
