"""Time steps of the small model, apart for its blocks and for what stands outside them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from fluxtrain.core.device.heap import trim_heap
from fluxtrain.measure.peaks import measure_host_peak_anew, recent_host_peak_bytes
from fluxtrain.measure.small_model import NotCalibrated
from fluxtrain.methods.objective import BoundBatch
from fluxtrain.plan.calibration import median

if TYPE_CHECKING:
    from fluxtrain.core.wrap.engine import Engine

Mark = Literal["enters", "leaves", "backward enters", "backward leaves"]


class BlockMarks:
    """Calls `mark` where the forward and the backward pass of each block begin and end."""

    def __init__(
        self,
        blocks: Iterable[nn.Module],
        mark: Callable[[Mark], None],
        *,
        to_the_input: bool = True,
    ) -> None:
        """Prepare timing. to_the_input: mark where a backward pass ends, too, which needs a
        gradient of the first block's input even where the model computes none."""
        self._mark = mark
        self._hooks = []
        for block in blocks:
            enters = self._enters_and_returns if to_the_input else self._enters
            self._hooks.append(block.register_forward_pre_hook(enters, with_kwargs=True))
            self._hooks.append(block.register_forward_hook(self._leaves))

    def remove(self) -> None:
        """Remove the hooks from the blocks."""
        for hook in self._hooks:
            hook.remove()

    def _enters(self, *_: object) -> None:
        self._mark("enters")

    def _enters_and_returns(
        self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        self._mark("enters")
        hidden = _first_tensor((*args, *kwargs.values()), else_first=True)
        hidden.register_hook(lambda _: self._mark("backward leaves"))

    def _leaves(self, _: nn.Module, args: tuple[Any, ...], out: Any) -> None:
        self._mark("leaves")
        hidden = _first_tensor(out if isinstance(out, tuple) else (out,))
        hidden.register_hook(lambda _: self._mark("backward enters"))


def repeat_steps(step: Callable[[], object], *, most: int, limit_s: float, least: int = 1) -> None:
    """Run up to `most` steps, and none after `limit_s` once `least` are done."""
    started_s = time.perf_counter()
    for count in range(1, most + 1):
        step()
        if count >= least and time.perf_counter() - started_s > limit_s:
            break


def _first_tensor(values: tuple[Any, ...], *, else_first: bool = False) -> Tensor:
    """Return the hidden states: the first input (or output) that a gradient reaches.

    `else_first`: where a frozen embedding gives no gradient, let it reach the first input of
    floating point, as it does in all blocks but the first.
    """
    for value in values:
        if isinstance(value, Tensor) and value.requires_grad:
            return value
    for value in values if else_first else ():
        if isinstance(value, Tensor) and value.is_floating_point() and value.is_leaf:
            return value.requires_grad_()
    raise NotCalibrated("no gradient reaches the input of its first block")


COPIES = 2  # of each list's block: the second starts as every block but the first does
STEPS = 8  # at one size, at most
HEAT_S = 0.3  # of steps on a GPU that are not counted: a cool GPU clocks up to a sixth higher
LIMIT_S = 0.4  # for the steps at one size on a GPU; the last may end later
CPU_LIMIT_S = 0.25  # for the steps at one size in one repeat without a GPU
WARMING = 2  # streamed steps: the first touches weights and gradients, the second the moments


@dataclass
class BlockTimes:
    """Seconds and bytes of the steps at one size, by kind of work."""

    rows: int
    seconds: dict[str, list[float]] = field(default_factory=dict)
    activation_bytes: int = 0
    edge_bytes: int = 0  # taken between the loss and the last block
    held_bytes: int = 0  # by the device after the forward pass of all copies
    keeps: bool = False  # the copies were also run without recompute
    kept_bytes: int = 0  # activations of one copy, without recompute

    def add_step(self, **parts: float) -> None:
        """Add the seconds of one step, by kind of work."""
        for name, seconds in parts.items():
            self.seconds.setdefault(name, []).append(seconds)

    def add(self, other: BlockTimes) -> None:
        """Add the steps of another repeat at the same size."""
        for name, seconds in other.seconds.items():
            self.seconds.setdefault(name, []).extend(seconds)
        self.activation_bytes = max(self.activation_bytes, other.activation_bytes)

    def take_larger_memory(self, other: BlockTimes) -> None:
        """Raise each number of bytes to that of `other`, where that is larger."""
        for name in ("activation_bytes", "edge_bytes", "kept_bytes"):
            setattr(self, name, max(getattr(self, name), getattr(other, name)))

    @property
    def step_s(self) -> float:
        """Return the seconds of one block and of the modules outside blocks, forward
        and backward."""
        parts = ("forward", "backward", "outside_forward", "outside_backward")
        return sum(self.median(name) for name in parts if self.seconds.get(name))

    def median(self, name: str) -> float:
        """Return the median seconds of the work called `name`."""
        return median(self.seconds[name])


@dataclass
class _Marks:
    """Times at which a step passed its marks, by their names.

    `passed` are those of the device's stream (of the host without a GPU), `queued_s` those at which
    the host had queued the work before the mark.
    """

    passed: dict[str, list[Any]] = field(default_factory=dict)
    queued_s: dict[str, list[float]] = field(default_factory=dict)

    def host_between(self, start: str, end: str) -> float:
        """Sum the host's seconds from each mark `start` to its mark `end`."""
        pairs = zip(self.queued_s[start], self.queued_s[end], strict=True)
        return sum(after - before for before, after in pairs)


class BlockTimer:
    """Runs steps of the small model and times them by marks where its blocks begin and end.

    On a GPU the steps follow each other as in a training: the host queues one step while the GPU
    computes the step before. So the GPU never waits for the host, and runs at the clock rate that
    it keeps under load.
    """

    def __init__(
        self, small: nn.Module, engine: Engine, blocks: list[nn.Module], device: torch.device
    ) -> None:
        self._small, self._engine, self._device = small, engine, device
        self._on_gpu = device.type == "cuda"
        self._marks = _Marks()
        self._held_bytes = 0
        self._measures_memory = self._at_the_loss = False
        self._times = BlockTimes(0)
        self._count = len(blocks)
        trained = [p for block in blocks for p in block.parameters() if p.requires_grad]
        self._updated = sum(p.numel() for p in trained)
        self._optimizer = torch.optim.AdamW(trained, lr=1e-5) if trained else None
        mine = {id(parameter) for parameter in trained}
        self._others = [p for p in small.parameters() if p.requires_grad and id(p) not in mine]
        self._block_marks = BlockMarks(blocks, self._pass)

    def close(self) -> None:
        """Remove the hooks from the blocks."""
        self._block_marks.remove()

    def measure(
        self, batch: BoundBatch[Any], *, chunk_rows: int | None = None, memory: bool = True
    ) -> BlockTimes:
        """Time steps of `batch` in chunks of `chunk_rows` rows; None: as one chunk.

        A step that warms up comes first. Without a GPU, and for a batch that is one chunk, a step
        that measures the block's `memory` follows; its time does not count.
        """
        times = self._times = BlockTimes(batch.rows)
        self._engine.chunk_rows = chunk_rows or times.rows
        # a copy within a step would make the host wait for all work queued before it
        batch = batch.to(self._device)
        self._step(batch)
        if memory and not self._on_gpu and chunk_rows is None:
            self._step_for_memory(batch)
        times.seconds.clear()
        if self._on_gpu:
            self._run_steps(batch, HEAT_S, LIMIT_S)
            self._run_without_recompute(batch, times)
            return times
        repeat_steps(lambda: self._step(batch), most=STEPS, limit_s=CPU_LIMIT_S)
        return times

    def measure_memory(self, batch: BoundBatch[Any], times: BlockTimes) -> None:
        """Raise the bytes in `times`, which are those of other rows, to what `batch` takes.

        Rows of several documents need a mask, with which attention keeps more, and may come late in
        a run.
        """
        other = self._times = BlockTimes(times.rows)
        self._engine.chunk_rows = times.rows
        # a copy within a step would make the host wait for all work queued before it
        batch = batch.to(self._device)
        self._step(batch)
        if not self._on_gpu:
            self._step_for_memory(batch)
        elif times.keeps:
            self._run_without_recompute(batch, other)
        times.take_larger_memory(other)

    def _run_without_recompute(self, batch: BoundBatch[Any], times: BlockTimes) -> None:
        """Run the steps again with the blocks' activations kept, and add the differences to
        `times`: the backward pass and the memory held."""
        kept = self._times = BlockTimes(times.rows)
        for unit in self._engine.units:
            unit.recomputes = unit.group.kind != "block"
        try:
            self._run_steps(batch, 0.0, LIMIT_S / 2)
        except torch.OutOfMemoryError:
            return
        finally:
            for unit in self._engine.units:
                unit.recomputes = True
        times.seconds["kept_backward"] = kept.seconds["backward"]
        times.keeps = True
        times.kept_bytes = max(0, kept.held_bytes - times.held_bytes) // self._count

    def _run_steps(self, batch: BoundBatch[Any], heat_s: float, limit_s: float) -> None:
        """Run steps without a pause between them. Steps that the device begins after `heat_s`
        count, but never the first step."""
        counted: list[_Marks] = []
        before: _Marks | None = None
        started_s, past_s = time.perf_counter(), 0.0
        while len(counted) < STEPS and not (counted and past_s > limit_s):
            step = self._queue(batch)
            if before is not None:
                before.passed["updated"][0].synchronize()
                past_s = time.perf_counter() - started_s - heat_s  # `step` begins on the GPU now
                counted += [step] if past_s >= 0 else []
            before = step
        self._wait()
        for step in counted:
            self._add_to_times(step)

    def _step(self, batch: BoundBatch[Any]) -> None:
        """Run one step and wait for its end."""
        step = self._queue(batch)
        self._wait()
        self._add_to_times(step)

    def _step_for_memory(self, batch: BoundBatch[Any]) -> None:
        """Run one step that measures the host memory of a block's backward pass."""
        self._measures_memory = True
        self._step(batch)
        self._measures_memory = False

    def _queue(self, batch: BoundBatch[Any]) -> _Marks:
        """Queue one step on the device and return its marks."""
        step = self._marks = _Marks()
        self._mark("start")
        loss = batch.loss(self._small)
        self._mark("loss")
        if self._on_gpu:
            self._at_the_loss = True
            self._begin_peak()
        loss.backward()
        self._mark("backward")
        self._update()
        for parameter in self._small.parameters():
            parameter.grad = None
        return step

    def _add_to_times(self, step: _Marks) -> None:
        """Add a finished step to the times of its size. Raises NotCalibrated where it passed fewer
        blocks than there are."""
        if (passed := len(step.passed["enters"])) < self._count:
            raise NotCalibrated(f"a batch passes {passed} of {self._count} blocks of its lists")
        forward_s = self._between(step, "enters", "leaves")
        backward_s = self._between(step, "backward enters", "backward leaves")
        host_s = step.host_between("enters", "leaves") if self._on_gpu else 0.0
        host_backward_s = step.host_between("backward enters", "backward leaves")
        self._times.add_step(
            forward=forward_s / self._count,
            backward=backward_s / self._count,
            host_forward=host_s / self._count,
            host=(host_s + host_backward_s) / self._count if self._on_gpu else 0.0,
            outside_forward=max(0.0, self._between(step, "start", "loss") - forward_s),
            outside_backward=max(0.0, self._between(step, "loss", "backward") - backward_s),
            host_outside=step.host_between("start", "backward") - host_s - host_backward_s,
            host_update=step.host_between("clipped", "updated") / self._count,
            update=self._between(step, "backward", "updated") / max(1, self._updated),
            whole=self._between(step, "start", "backward"),
        )

    def _update(self) -> None:
        """Clip the norm and update the weights, which stay on the device."""
        if self._optimizer is not None:
            self._engine.clip_grad_norm(1.0)
        for parameter in self._others:  # to clip what no optimizer steps the host reads the norm
            parameter.grad = None
        self._mark("clipped")
        if self._optimizer is not None:
            self._optimizer.step()
            self._optimizer.zero_grad()
        self._mark("updated")

    def _pass(self, name: Mark) -> None:
        """Mark where a pass of a block begins or ends, and measure it."""
        self._mark(name)
        if name == "leaves" and self._on_gpu:
            self._times.held_bytes = torch.cuda.memory_allocated(self._device)
        elif name == "backward enters":
            self._backward_enters()
        elif name == "backward leaves":
            self._backward_left()

    def _backward_enters(self) -> None:
        if self._on_gpu:
            if self._at_the_loss:
                self._at_the_loss = False
                self._times.edge_bytes = max(self._times.edge_bytes, self._taken_bytes())
            self._begin_peak()
        elif self._measures_memory:
            trim_heap()
            self._held_bytes = measure_host_peak_anew() or 0

    def _begin_peak(self) -> None:
        """Note the memory that the device holds now and begin a new peak."""
        torch.cuda.reset_peak_memory_stats(self._device)
        self._held_bytes = torch.cuda.memory_allocated(self._device)

    def _taken_bytes(self) -> int:
        """Return the most bytes that were taken since `_begin_peak`."""
        return max(0, torch.cuda.max_memory_allocated(self._device) - self._held_bytes)

    def _backward_left(self) -> None:
        if self._on_gpu:
            taken = self._taken_bytes()
            self._times.activation_bytes = max(self._times.activation_bytes, taken)
        elif self._measures_memory and self._held_bytes:
            peak = (recent_host_peak_bytes() or 0) - self._held_bytes
            self._times.activation_bytes = max(self._times.activation_bytes, peak)

    def _mark(self, name: str) -> None:
        """Mark this point of the step: on the host's clock, and in the stream of a GPU."""
        now: Any = time.perf_counter()
        self._marks.queued_s.setdefault(name, []).append(now)
        if self._on_gpu:
            now = torch.cuda.Event(enable_timing=True)
            now.record(torch.cuda.current_stream(self._device))
        self._marks.passed.setdefault(name, []).append(now)

    def _between(self, step: _Marks, start: str, end: str) -> float:
        """Sum the seconds from each mark `start` to its mark `end`."""
        pairs = zip(step.passed[start], step.passed[end], strict=True)
        if self._on_gpu:
            return float(sum(before.elapsed_time(after) for before, after in pairs)) / 1e3
        return float(sum(after - before for before, after in pairs))

    def _wait(self) -> None:
        if self._on_gpu:
            torch.cuda.synchronize(self._device)


def streamed_steps(
    small: nn.Module, engine: Engine, batch: BoundBatch[Any]
) -> tuple[Sequence[float], int]:
    """Return the seconds of whole steps that update all trained weights, and the bytes that one
    step copies."""
    optimizer = torch.optim.AdamW([p for p in small.parameters() if p.requires_grad], lr=1e-5)
    ends_s = [time.perf_counter()]
    while len(ends_s) <= WARMING + STEPS:
        batch.loss(small).backward()
        engine.clip_grad_norm(1.0)
        optimizer.step()
        optimizer.zero_grad()
        ends_s.append(time.perf_counter())
        if len(ends_s) > 1 + WARMING and ends_s[-1] - ends_s[WARMING] > 2 * CPU_LIMIT_S:
            break
    engine.flush()
    traffic = engine.traffic()
    steps_s = [after - before for before, after in pairwise(ends_s)]
    return steps_s[WARMING:], (traffic.h2d_bytes + traffic.d2h_bytes) // len(steps_s)
