"""Steps of a miniature of a model, timed between the borders of its blocks."""

from __future__ import annotations

import gc
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from fluxtrain.calibration.peaks import measure_host_peak_anew, recent_host_peak_bytes
from fluxtrain.device.heap import trim_heap
from fluxtrain.errors import FluxTrainError
from fluxtrain.methods.objective import BoundBatch
from fluxtrain.plan.cost.calibration import median

if TYPE_CHECKING:
    from fluxtrain.wrapping.engine import Engine

COPIES = 2  # of the block: the second starts as every block but the first does
REPEATS = 8
HEAT_S = 0.3  # of steps on a GPU that are not counted: a cool one clocks up to a sixth higher
LIMIT_S = 0.4  # for the repeats at one size; the last may end later
ROUND_LIMIT_S = 0.25  # the same in one of the rounds that are made without a GPU


class NotCalibrated(FluxTrainError):
    """Why a block could not be tried; the planner goes on with what it knew."""


@dataclass
class Trial:
    """What the repeats at one size took, by what took it."""

    rows: int
    seconds: dict[str, list[float]] = field(default_factory=dict)
    activation_bytes: int = 0
    edge_bytes: int = 0  # from the loss to the blocks
    held_bytes: int = 0  # by the device after both copies' forward
    keeps: bool = False  # the copies were also run with their activations kept
    kept_bytes: int = 0  # of both copies

    def took(self, **parts: float) -> None:
        for name, seconds in parts.items():
            self.seconds.setdefault(name, []).append(seconds)

    def add(self, other: Trial) -> None:
        """The repeats of another trial at the same size."""
        for name, seconds in other.seconds.items():
            self.seconds.setdefault(name, []).extend(seconds)
        self.activation_bytes = max(self.activation_bytes, other.activation_bytes)

    def weighs_as(self, other: Trial) -> None:
        """What is held is the more of both."""
        for name in ("activation_bytes", "edge_bytes", "kept_bytes"):
            setattr(self, name, max(getattr(self, name), getattr(other, name)))

    def median(self, name: str) -> float:
        return median(self.seconds[name])


@dataclass
class _Marks:
    """When a step passed its borders, by their names: on the device's stream (on CPU: the host),
    and when the host had queued it."""

    passed: dict[str, list[Any]] = field(default_factory=dict)
    queued_s: dict[str, list[float]] = field(default_factory=dict)

    def host_between(self, start: str, end: str) -> float:
        """Seconds that the host took from each mark `start` to its mark `end`, added up."""
        pairs = zip(self.queued_s[start], self.queued_s[end], strict=True)
        return sum(after - before for before, after in pairs)


class Bench:
    """Steps of the miniature, taken apart at the borders of its blocks.

    On a GPU they follow each other as in a training: the host queues one while the one before is
    computed, so that no time is the host's, and the clocks are those that a card keeps up under
    load.
    """

    def __init__(
        self, mini: nn.Module, engine: Engine, blocks: list[nn.Module], device: torch.device
    ) -> None:
        self._mini, self._engine, self._device = mini, engine, device
        self._on_gpu = device.type == "cuda"
        self._marks = _Marks()
        self._held_bytes = 0
        self._weighs = self._at_the_loss = False
        self._trial = Trial(0)
        trained = [p for block in blocks for p in block.parameters() if p.requires_grad]
        self._updated = sum(p.numel() for p in trained)
        self._optimizer = torch.optim.AdamW(trained, lr=1e-5) if trained else None
        self._hooks = [
            handle
            for block in blocks
            for handle in (
                block.register_forward_pre_hook(self._enters, with_kwargs=True),
                block.register_forward_hook(self._leaves),
            )
        ]

    def close(self) -> None:
        """Let go of the blocks."""
        for handle in self._hooks:
            handle.remove()

    def trial(
        self, batch: BoundBatch[Any], *, chunk_rows: int | None = None, weighs: bool = True
    ) -> Trial:
        """Repeats with the rows of `batch` (None: as one chunk), after one that warms up and, where
        memory is the host's, one that `weighs` what a block holds and takes time for that."""
        trial = self._trial = Trial(batch.rows)
        self._engine.chunk_rows = chunk_rows or trial.rows
        # the host must not wait in a step for a copy behind what is still computed
        batch = batch.to(self._device)
        self._step(batch)
        if weighs and not self._on_gpu and chunk_rows is None:
            self._weighs = True
            self._step(batch)
            self._weighs = False
        trial.seconds.clear()
        if self._on_gpu:
            self._repeat(batch, HEAT_S, LIMIT_S)
            self._keep(batch, trial)
            return trial
        started_s = time.perf_counter()
        for _ in range(REPEATS):
            self._step(batch)
            if time.perf_counter() - started_s > ROUND_LIMIT_S:
                break
        return trial

    def weighed(self, batch: BoundBatch[Any], trial: Trial) -> None:
        """What `batch` holds counts for `trial`, of other rows, where it is more: rows of several
        documents need a mask, with which attention keeps more, and may come late in a run."""
        other = self._trial = Trial(trial.rows)
        self._engine.chunk_rows = trial.rows
        # the host must not wait in a step for a copy behind what is still computed
        batch = batch.to(self._device)
        self._step(batch)
        if not self._on_gpu:
            self._weighs = True
            self._step(batch)
            self._weighs = False
        elif trial.keeps:
            self._keep(batch, other)
        trial.weighs_as(other)

    def _keep(self, batch: BoundBatch[Any], trial: Trial) -> None:
        """The same with the activations kept: only the backward pass differs, and what is held."""
        kept = self._trial = Trial(trial.rows)
        for unit in self._engine.units:
            unit.recomputes = unit.group.kind != "block"
        try:
            self._repeat(batch, 0.0, LIMIT_S / 2)
        except torch.OutOfMemoryError:
            return
        finally:
            for unit in self._engine.units:
                unit.recomputes = True
        trial.seconds["kept_backward"] = kept.seconds["backward"]
        trial.keeps, trial.kept_bytes = True, max(0, kept.held_bytes - trial.held_bytes)

    def _repeat(self, batch: BoundBatch[Any], heat_s: float, limit_s: float) -> None:
        """Steps one behind the other without a pause; those that the device begins after `heat_s`
        count, but never the first."""
        counted: list[_Marks] = []
        before: _Marks | None = None
        started_s, past_s = time.perf_counter(), 0.0
        while len(counted) < REPEATS and not (counted and past_s > limit_s):
            step = self._queue(batch)
            if before is not None:
                before.passed["updated"][0].synchronize()
                past_s = time.perf_counter() - started_s - heat_s  # it begins now
                counted += [step] if past_s >= 0 else []
            before = step
        self._wait()
        for step in counted:
            self._tell(step)

    def _step(self, batch: BoundBatch[Any]) -> None:
        """One step, waited for."""
        step = self._queue(batch)
        self._wait()
        self._tell(step)

    def _queue(self, batch: BoundBatch[Any]) -> _Marks:
        step = self._marks = _Marks()
        self._mark("start")
        loss = batch.loss(self._mini)
        self._mark("loss")
        if self._on_gpu:
            self._at_the_loss = True
            self._hold()
        loss.backward()
        self._mark("backward")
        self._update()
        for parameter in self._mini.parameters():
            parameter.grad = None
        return step

    def _tell(self, step: _Marks) -> None:
        """What a step took that is over."""
        forward_s = self._between(step, "enters", "leaves")
        backward_s = self._between(step, "backward enters", "backward leaves")
        host_s = step.host_between("enters", "leaves") if self._on_gpu else 0.0
        host_backward_s = step.host_between("backward enters", "backward leaves")
        self._trial.took(
            forward=forward_s / COPIES,
            backward=backward_s / COPIES,
            host_forward=host_s / COPIES,
            host=(host_s + host_backward_s) / COPIES if self._on_gpu else 0.0,
            outside_forward=max(0.0, self._between(step, "start", "loss") - forward_s),
            outside_backward=max(0.0, self._between(step, "loss", "backward") - backward_s),
            host_outside=step.host_between("start", "backward") - host_s - host_backward_s,
            host_update=step.host_between("clipped", "updated") / COPIES,
            update=self._between(step, "backward", "updated") / max(1, self._updated),
            whole=self._between(step, "start", "backward"),
        )

    def _update(self) -> None:
        """The norm and the optimizer, of weights that live on the device."""
        if self._optimizer is not None:
            self._engine.clip_grad_norm(1.0)
        self._mark("clipped")
        if self._optimizer is not None:
            self._optimizer.step()
            self._optimizer.zero_grad()
        self._mark("updated")

    def _enters(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._mark("enters")
        hidden = _first_tensor((*args, *kwargs.values()))
        hidden.register_hook(lambda _: self._backward_left())

    def _leaves(self, _: nn.Module, args: tuple[Any, ...], out: Any) -> None:
        self._mark("leaves")
        if self._on_gpu:
            self._trial.held_bytes = torch.cuda.memory_allocated(self._device)
        hidden = _first_tensor(out if isinstance(out, tuple) else (out,))
        hidden.register_hook(lambda _: self._backward_enters())

    def _backward_enters(self) -> None:
        self._mark("backward enters")
        if self._on_gpu:
            if self._at_the_loss:
                self._at_the_loss = False
                self._trial.edge_bytes = max(self._trial.edge_bytes, self._taken_bytes())
            self._hold()
        elif self._weighs:
            trim_heap()
            self._held_bytes = measure_host_peak_anew() or 0

    def _hold(self) -> None:
        """What the device holds now; what is taken beside it from now on is to be told."""
        torch.cuda.reset_peak_memory_stats(self._device)
        self._held_bytes = torch.cuda.memory_allocated(self._device)

    def _taken_bytes(self) -> int:
        """The most that was taken since `_hold`."""
        return max(0, torch.cuda.max_memory_allocated(self._device) - self._held_bytes)

    def _backward_left(self) -> None:
        self._mark("backward leaves")
        if self._on_gpu:
            taken = self._taken_bytes()
            self._trial.activation_bytes = max(self._trial.activation_bytes, taken)
        elif self._weighs and self._held_bytes:
            peak = (recent_host_peak_bytes() or 0) - self._held_bytes
            self._trial.activation_bytes = max(self._trial.activation_bytes, peak)

    def _mark(self, name: str) -> None:
        """The time now: the host's, or that of the device's stream."""
        now: Any = time.perf_counter()
        self._marks.queued_s.setdefault(name, []).append(now)
        if self._on_gpu:
            now = torch.cuda.Event(enable_timing=True)
            now.record(torch.cuda.current_stream(self._device))
        self._marks.passed.setdefault(name, []).append(now)

    def _between(self, step: _Marks, start: str, end: str) -> float:
        """Seconds from each mark `start` to its mark `end`, added up."""
        pairs = zip(step.passed[start], step.passed[end], strict=True)
        if self._on_gpu:
            return float(sum(before.elapsed_time(after) for before, after in pairs)) / 1e3
        return float(sum(after - before for before, after in pairs))

    def _wait(self) -> None:
        if self._on_gpu:
            torch.cuda.synchronize(self._device)


def _first_tensor(values: tuple[Any, ...]) -> Tensor:
    """The hidden states: the first input (or output) that a gradient reaches."""
    for value in values:
        if isinstance(value, Tensor) and value.requires_grad:
            return value
    raise NotCalibrated("no gradient reaches the input of its first block")


def give_back(device: torch.device) -> None:
    """Free what the miniature held: the plan counts what is free."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
        release = getattr(torch._C, "_host_emptyCache", None)  # not of every build
        if release is not None:  # boundaries that waited on the host were page-locked
            release()
    trim_heap()
