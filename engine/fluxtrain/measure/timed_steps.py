"""Time whole steps of some blocks on the host, to learn what a GPU's host takes in a training.

What is timed by itself is faster than in a training. There, AdamW shares the host's memory with
copies, and its cores with the threads that queue the GPU's work. Those threads wait for a core, for
memory and for Python's lock, and a thread has to be woken between the updates of two blocks. So a
small model with all its blocks on the host is trained in several kinds of steps: without an
optimizer, with activations on the device and on the host; and as the run will, with the update of
each block at once and in two passes, or within the backward pass.

Each kind takes a few steps of few rows: neither AdamW nor the queueing depends on the rows, and the
GPU is then never what they wait for. Where what is queued for a block counts, the same rows are
also queued in chunks: what is done once a block and what is done for each chunk are then told
apart. There are so many blocks that a gradient, which is updated soon after its download, is no
large part of the processor's cache.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import fmean
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn

from fluxtrain.core.device.recorder import Note
from fluxtrain.core.wrap.block_discovery import take_apart
from fluxtrain.core.wrap.grouping import facts_of
from fluxtrain.core.wrap.slots import choose_recompute
from fluxtrain.errors import Diverged
from fluxtrain.measure.block_timing import BlockMarks, Mark, repeat_steps
from fluxtrain.measure.small_model import (
    free_memory,
    make_small_model,
    middle_block,
    wrapped,
)
from fluxtrain.methods.objective import BoundBatch
from fluxtrain.plan.calibration import Line, StepsNotTimed, line_through, median
from fluxtrain.plan.facts import HALF_BYTES, GroupFacts
from fluxtrain.plan.request import PlacementRequest
from fluxtrain.plan.states import StateFormat, StorageFormat
from fluxtrain.units import bytes_text

if TYPE_CHECKING:
    from fluxtrain.core.wrap.engine import Engine

PARAMETERS = 480 << 20  # of all blocks: the gradients of few would still be in a large cache
LEAST_BLOCKS, MOST_BLOCKS = 3, 12
BYTES_A_PARAMETER = 16  # on the host: weight, masters, moments and gradient
HOST_SHARE = 4  # the blocks take at most one part in so many of the available host memory
WARMING = 2  # steps: the first touches weights and gradients, the second the moments
LEAST_STEPS, STEPS = 2, 4  # of one kind
CHUNKS = 4  # that the rows are cut into, if they are as many
LIMIT_S = 0.8  # for the steps of one kind; the last may end later

_SIZE = r"[\d.]+ (?:[KMGT]iB|bytes)"
Kind = Literal[
    "alone",  # no update, activations on the device
    "offloaded",  # no update, activations on the host
    "whole",  # each block's update at once
    "passes",  # its weights first, its moments later
    "in_backward",  # its update in the backward pass
]


@dataclass(frozen=True, kw_only=True)
class StepTimes:
    """Seconds of one kind of steps, for each block."""

    forward_s: float  # the host queues one block's pass in one chunk, less what it waits for
    backward_s: float
    # The same over its chunks; where the kind was not timed in chunks all counts as the chunk's
    forward: Line
    backward: Line
    optimizer_s: float  # the host, for each block: `step()` and dropping its gradients
    # AdamW, from the start of a block to the start of the next; None: none ran
    update_s: float | None
    moments_s: float | None


def time_steps(
    model: nn.Module,
    batch: BoundBatch[Any],
    device: torch.device,
    formats: tuple[StateFormat, StorageFormat],
    host_available_bytes: int | None,
    *,
    in_backward: bool,
) -> tuple[dict[Kind, StepTimes], GroupFacts] | StepsNotTimed:
    """Time the kinds of steps that an `in_backward` run, or one that clips, can make.

    Returns their times with the facts of the timed block, or the reason why there are none: device
    or host have too little memory, no block is trained, or copies of one block give a loss or
    gradients that are not finite.
    """
    block = middle_block(model)
    parameters = sum(p.numel() for p in block.parameters())
    if not any(p.requires_grad for p in block.parameters()):
        return StepsNotTimed(why="no parameter of its blocks is trained", lasts=True)
    trained = sum(p.numel() for p in block.parameters() if p.requires_grad)
    block_bytes = BYTES_A_PARAMETER * trained + 2 * HALF_BYTES * (parameters - trained)
    count = _blocks_for(parameters, block_bytes, host_available_bytes)
    if isinstance(count, StepsNotTimed):
        return count
    try:
        return _timed(model, count, batch, device, formats, in_backward=in_backward)
    except (torch.OutOfMemoryError, MemoryError, Diverged) as error:
        return StepsNotTimed(why=f"{count} copies of a block failed: {_why(error)}")
    finally:
        free_memory(device)


def _timed(
    model: nn.Module,
    count: int,
    batch: BoundBatch[Any],
    device: torch.device,
    formats: tuple[StateFormat, StorageFormat],
    *,
    in_backward: bool,
) -> tuple[dict[Kind, StepTimes], GroupFacts]:
    host = torch.device("cpu")
    # blocks of one kind: of their mean time no rate of AdamW could be told
    small = make_small_model(model, count, blocks=host, edges=host, every_list=False).train()
    blocks = [module for _, module in take_apart(small).blocks]
    within = {id(p) for module in blocks for p in module.parameters()}
    for parameter in small.parameters():
        if id(parameter) not in within:
            parameter.requires_grad_(False)  # a plan counts the edges by themselves
    states, frozen = formats
    facts = next(g for g in facts_of(small, states, frozen).groups if g.kind == "block")
    rows = batch.rows
    on_host = PlacementRequest(device_groups=0, resident_blocks=0, embedding="whole")
    how: dict[str, Any] = {"placement": on_host, "states": states, "deferred_moments": True}
    how["frozen"] = frozen
    with wrapped(small, device, "weights", rows, **how) as engine:
        timer = _StepTimer(small, engine, blocks, batch, device)
        kinds: list[Kind] = ["alone", "offloaded", "in_backward" if in_backward else "whole"]
        kinds += ["passes"] if facts.pass_bytes and not in_backward else []
        in_chunks = ("alone", kinds[-1])
        return {kind: timer.measure(kind, in_chunks=kind in in_chunks) for kind in kinds}, facts


def _blocks_for(
    parameters: int, one_bytes: int, available_bytes: int | None
) -> int | StepsNotTimed:
    """Choose how many blocks of `parameters` parameters in `one_bytes` to time, or say why too few
    fit."""
    count = max(LEAST_BLOCKS, min(MOST_BLOCKS, -(-PARAMETERS // max(1, parameters))))
    if available_bytes is None:
        return count
    one_bytes = max(1, one_bytes)
    fitting = available_bytes // HOST_SHARE // one_bytes
    if fitting >= LEAST_BLOCKS:
        return min(count, fitting)
    least_bytes = LEAST_BLOCKS * one_bytes
    why = (
        f"{LEAST_BLOCKS} blocks take {bytes_text(least_bytes)} and may take 1/{HOST_SHARE} of the "
        f"{bytes_text(available_bytes)} of host memory that is free"
    )
    return StepsNotTimed(why=why)


def _why(error: Exception) -> str:
    """Say what failed; of torch's long message about memory only the numbers."""
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
    """The host's times in the steps of one kind, a list for each step."""

    forwards: list[list[float]] = field(default_factory=list)  # when each block was entered
    backwards: list[list[float]] = field(default_factory=list)
    optimizer_s: list[float] = field(default_factory=list)


class _StepTimer:
    """Runs and times the steps of every kind."""

    def __init__(
        self,
        small: nn.Module,
        engine: Engine,
        blocks: Sequence[nn.Module],
        batch: BoundBatch[Any],
        device: torch.device,
    ) -> None:
        self._small, self._engine, self._blocks = small, engine, blocks
        self._batch = batch.to(device)
        self._recorder = engine.device.recorder
        self._optimizer = torch.optim.AdamW(
            [p for p in small.parameters() if p.requires_grad], 1e-6
        )
        self._seen = _Seen()
        BlockMarks(blocks, self._pass, to_the_input=False)
        for _ in range(WARMING):
            self._step("whole")

    def measure(self, kind: Kind, *, in_chunks: bool) -> StepTimes:
        """Time some steps of a kind, with `in_chunks` also of the same rows in chunks."""
        lanes = self._some_steps(kind)
        forward_s, backward_s = self._queued_s(lanes)
        forward, backward = Line(base=0.0, slope=forward_s), Line(base=0.0, slope=backward_s)
        optimizer_s = median(self._seen.optimizer_s)
        rows = self._batch.rows
        chunk_rows = -(-rows // CHUNKS)
        if in_chunks and chunk_rows < rows:
            self._engine.chunk_rows = chunk_rows
            cut_s = self._queued_s(self._some_steps(kind))
            self._engine.chunk_rows = rows
            chunks = -(-rows // chunk_rows)
            forward = line_through((1, forward_s), (chunks, cut_s[0]))
            backward = line_through((1, backward_s), (chunks, cut_s[1]))
        count = len(self._blocks)
        return StepTimes(
            forward_s=forward_s,
            backward_s=backward_s,
            forward=forward,
            backward=backward,
            optimizer_s=optimizer_s / count,
            update_s=_one_to_next(lanes.get("update", []), count, waits=kind == "in_backward"),
            moments_s=_one_to_next(lanes.get("moments", []), count, waits=False),
        )

    def _some_steps(self, kind: Kind) -> dict[str, list[tuple[float, float]]]:
        """Run some steps of a kind, after one that does not count; return what the recorder noted
        of the host, by lane or kind."""
        engine = self._engine
        engine.updates.defers_moments = kind == "passes"
        engine.plan = engine.plan.with_activations(
            "inputs_on_host" if kind == "offloaded" else "inputs_on_device"
        )
        choose_recompute(engine)  # it decides from the plan which inputs are offloaded
        self._step(kind)
        self._engine.flush()
        self._seen = _Seen()
        self._recorder.notes.clear()
        repeat_steps(
            lambda: self._recorded_step(kind), most=STEPS, least=LEAST_STEPS, limit_s=LIMIT_S
        )
        self._engine.flush()
        for group in self._engine.groups:
            group.jobs.wait()
        self._recorder.end_step()
        notes = [note for note in self._recorder.notes if isinstance(note, Note)]
        self._recorder.notes.clear()
        return _by_lane(notes)

    def _recorded_step(self, kind: Kind) -> None:
        self._recorder.begin_step(len(self._seen.forwards) + 1)
        self._step(kind)

    def _step(self, kind: Kind) -> None:
        self._seen.forwards.append([])
        self._seen.backwards.append([])
        loss = self._batch.loss(self._small)
        if kind == "in_backward":
            self._engine.begin_step_in_backward(self._optimizer, loss)
        loss.backward()
        updates = kind not in ("alone", "offloaded")
        if updates:
            self._engine.clip_grad_norm(None if kind == "in_backward" else 1.0, [loss.detach()])
        started_s = time.perf_counter()
        if updates:
            self._optimizer.step()
        self._engine.forget_gradients()
        self._seen.optimizer_s.append(time.perf_counter() - started_s)

    def _queued_s(self, lanes: Mapping[str, Sequence[tuple[float, float]]]) -> tuple[float, float]:
        """Return the host's seconds to queue a block's forward and backward pass in these steps."""
        waits = [*lanes.get("host", []), *lanes.get("stall", [])]
        return _between(self._seen.forwards, waits), _between(self._seen.backwards, waits)

    def _pass(self, name: Mark) -> None:
        if name == "enters":
            self._seen.forwards[-1].append(time.perf_counter())
        elif name == "backward enters":
            self._seen.backwards[-1].append(time.perf_counter())


def _by_lane(notes: Iterable[Note]) -> dict[str, list[tuple[float, float]]]:
    """Return when the host began and ended something, by lane, of updates by kind."""
    found: dict[str, list[tuple[float, float]]] = {}
    for note in notes:
        if isinstance(note.start, float) and isinstance(note.stop, float):
            name = note.kind if note.lane == "cpu" else note.lane
            found.setdefault(name, []).append((note.start, note.stop))
    return found


def _between(steps: Iterable[Sequence[float]], waits: Sequence[tuple[float, float]]) -> float:
    """Return the median seconds from one mark to the next of its step, less the waits between."""
    found = [
        after - before - sum(max(0.0, min(after, b) - max(before, a)) for a, b in waits)
        for marks in steps
        for before, after in pairwise(marks)
    ]
    return max(0.0, median(found)) if found else 0.0


def _one_to_next(
    intervals: Iterable[tuple[float, float]], blocks: int, *, waits: bool
) -> float | None:
    """Return the mean seconds from the start of an interval to that of the next one in its step.

    A step has `blocks` intervals. `waits`: the pauses between them include waits for gradients,
    which are no part of the update, so only the shorter half of the pauses counts.
    """
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
