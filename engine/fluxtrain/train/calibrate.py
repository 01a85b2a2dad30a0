"""Run one block for real before training: what it takes on this machine, for the planner.

A miniature of the model (its edges, and one of its blocks twice) goes through the engine as the run
will, at two chunk sizes, all of it on the device so that no copy is in the times. Without a GPU,
where copies and updates take time from the cores that compute, it then streams for some steps.
Weights are the model's own; nothing of the model itself is touched, and the random state is as it
was afterwards.
"""

from __future__ import annotations

import copy
import gc
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import psutil
import torch
from torch import Tensor, nn

import fluxtrain
from fluxtrain.data.batches import Batch
from fluxtrain.errors import FluxTrainError, UnsupportedModel
from fluxtrain.hardware.others import others_share, read_use
from fluxtrain.plan.calibration import Calibration, Streamed, line_through, median
from fluxtrain.plan.facts import Offload
from fluxtrain.stream.blocks import take_apart
from fluxtrain.stream.grouping import facts_of
from fluxtrain.stream.rng import randomness_kept
from fluxtrain.train.peaks import measure_host_peak_anew, recent_host_peak_bytes, trim_heap

if TYPE_CHECKING:
    from fluxtrain.stream.engine import Engine

COPIES = 2  # of the block: the second starts as every block but the first does
REPEATS = 8
LIMIT_S = 0.6  # for the repeats at one size; the last may end later
HEAD_START_CYCLES = 100_000_000  # of a GPU's clock: some 50 ms
LEAST_STEPS = 4  # of a streamed miniature; the first only warms up
ALL_CHECKED = 3  # recomputes after which the engine stops to compare them with the forward


class NotCalibrated(FluxTrainError):
    """Why a block could not be tried; the planner goes on with what it knew."""


def calibrate(
    model: nn.Module,
    batch_of: Callable[[int], Batch],
    device: torch.device,
    rows: tuple[int, int],
    fewer: tuple[int, int] | None = None,
) -> Calibration:
    """Time a block, and what stands outside the blocks, at chunks of `rows` rows, or of `fewer`
    where those do not fit.

    `batch_of` gives real rows. Raises NotCalibrated with the reason: blocks in several lists, or
    too little memory for the miniature.
    """
    started_s, before = time.monotonic(), read_use()
    process = psutil.Process()
    before_bytes = process.memory_info().rss
    try:
        with randomness_kept(device):
            few, many, streamed = _trials(model, batch_of, device, rows)
    except torch.OutOfMemoryError as error:
        if fewer is not None and fewer != rows:
            _give_back(device)
            return calibrate(model, batch_of, device, fewer)
        raise NotCalibrated("one block beside the head does not fit on the device") from error
    except UnsupportedModel as error:
        raise NotCalibrated(str(error)) from error
    finally:
        _give_back(device)

    def line(of: Callable[[_Trial], float]) -> Any:
        return line_through((few.rows, of(few)), (many.rows, of(many)))

    keeps = few.keeps and many.keeps
    return Calibration(
        forward=line(lambda trial: trial.median("forward")),
        backward=line(lambda trial: trial.median("backward")),
        outside_forward=line(lambda trial: trial.median("outside_forward")),
        outside_backward=line(lambda trial: trial.median("outside_backward")),
        activation_bytes=round(line(lambda trial: float(trial.activation_bytes)).slope),
        kept_backward=line(lambda trial: trial.median("kept_backward")) if keeps else None,
        kept_bytes=many.kept_bytes // (COPIES * many.rows) if keeps else None,
        host_block_s=many.median("host"),
        device_update_s=many.median("update"),
        streamed=streamed,
        runtime_bytes=max(0, process.memory_info().rss - before_bytes),
        rows=(few.rows, many.rows),
        measured_at_s=time.time(),
        measuring_s=time.monotonic() - started_s,
        others_share=others_share(before),
    )


@dataclass
class _Trial:
    """What the repeats at one size took, by what took it."""

    rows: int
    seconds: dict[str, list[float]] = field(default_factory=dict)
    activation_bytes: int = 0
    held_bytes: int = 0  # by the device after both copies' forward
    keeps: bool = False  # the copies were also run with their activations kept
    kept_bytes: int = 0  # of both copies

    def took(self, **parts: float) -> None:
        for name, seconds in parts.items():
            self.seconds.setdefault(name, []).append(seconds)

    def median(self, name: str) -> float:
        return median(self.seconds[name])


def _trials(
    model: nn.Module,
    batch_of: Callable[[int], Batch],
    device: torch.device,
    rows: tuple[int, int],
) -> tuple[_Trial, _Trial, Streamed | None]:
    mini = _miniature(model, device)
    mini.train()
    facts = facts_of(mini)
    few, many = _resident_trials(mini, batch_of, device, rows)
    if device.type == "cuda":
        return few, many, None
    _give_back(device)  # the trials after each other take no more than one of them
    with _wrapped(mini, device, "weights", max(rows)) as engine:
        seconds, copied_bytes = _streamed_steps(mini, engine, batch_of(max(rows)))
    streamed = Streamed(
        longer_s=seconds - min(many.seconds["whole"]),
        updated_bytes=sum(group.update_bytes for group in facts.groups),
        copied_bytes=copied_bytes,
        groups=len(facts.groups),
    )
    return few, many, streamed


def _resident_trials(
    mini: nn.Module,
    batch_of: Callable[[int], Batch],
    device: torch.device,
    rows: tuple[int, int],
) -> tuple[_Trial, _Trial]:
    with _wrapped(mini, device, "none", max(rows)) as engine:
        bench = _Bench(mini, engine, [module for _, module in take_apart(mini).blocks], device)
        few, many = (bench.trial(batch_of(count)) for count in rows)
        bench.close()
    return few, many


@contextmanager
def _wrapped(
    mini: nn.Module, device: torch.device, offload: Offload, chunk_rows: int
) -> Iterator[Engine]:
    from fluxtrain.stream.engine import engine_of

    fluxtrain.wrap(mini, device=device, offload=offload, chunk_rows=chunk_rows, overlap=True)
    engine = engine_of(mini)
    try:
        for unit in engine.units:
            unit.checked = ALL_CHECKED
        yield engine
    finally:
        fluxtrain.unwrap(mini)


def _streamed_steps(mini: nn.Module, engine: Engine, batch: Batch) -> tuple[float, int]:
    """Seconds of a whole step with the update of all that is trained, and bytes that it copies.

    The fastest step, to be compared with the fastest that does not stream: other programs disturb
    both, and what is left of that in a small difference would count once for every group.
    """
    optimizer = torch.optim.AdamW([p for p in mini.parameters() if p.requires_grad], lr=1e-5)
    ends_s = [time.perf_counter()]
    while len(ends_s) < LEAST_STEPS or (
        len(ends_s) <= 1 + REPEATS and ends_s[-1] - ends_s[0] < LIMIT_S
    ):
        mini(**batch.inputs()).loss.backward()
        engine.clip_grad_norm(1.0)
        optimizer.step()
        optimizer.zero_grad()
        ends_s.append(time.perf_counter())
    engine.flush()
    traffic = engine.traffic()
    steps_s = [after - before for before, after in pairwise(ends_s)]
    return min(steps_s[1:]), (traffic.h2d_bytes + traffic.d2h_bytes) // len(steps_s)


def _miniature(model: nn.Module, device: torch.device) -> nn.Module:
    """A copy of `model` on `device` with `COPIES` of its middle block in place of all of them."""
    parts = take_apart(model)
    lists = {name.rpartition(".")[0] for name, _ in parts.blocks}
    if len(lists) != 1:
        raise NotCalibrated(f"its blocks stand in {len(lists)} lists")
    listed = model.get_submodule(lists.pop())
    block = parts.blocks[len(parts.blocks) // 2][1]
    copies = [copy.deepcopy(block, _on(device, block.parameters())) for _ in range(COPIES)]
    short = nn.Sequential(*copies) if isinstance(listed, nn.Sequential) else nn.ModuleList(copies)
    inside = {id(parameter) for parameter in listed.parameters()}
    outside = (p for p in model.parameters() if id(p) not in inside)
    return copy.deepcopy(model, {**_on(device, outside), id(listed): short})


def _on(device: torch.device, parameters: Iterable[nn.Parameter]) -> dict[int, Any]:
    """What `deepcopy` takes for these parameters: copies that never exist twice on the host."""
    return {
        id(p): nn.Parameter(p.detach().to(device, copy=True), requires_grad=p.requires_grad)
        for p in parameters
    }


class _Bench:
    """Steps of the miniature, taken apart at the borders of its blocks."""

    def __init__(
        self, mini: nn.Module, engine: Engine, blocks: list[nn.Module], device: torch.device
    ) -> None:
        self._mini, self._engine, self._device = mini, engine, device
        self._on_gpu = device.type == "cuda"
        self._marks: dict[str, list[Any]] = {}
        self._host_marks: dict[str, list[float]] = {}
        self._held_bytes = 0
        self._weighs = False
        self._trial = _Trial(0)
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

    def trial(self, batch: Batch) -> _Trial:
        """Repeats with the rows of `batch`, after one that warms up and, where memory is the
        host's, one that weighs what a block holds and takes time for that."""
        trial = self._trial = _Trial(int(batch.input_ids.shape[0]))
        self._engine.chunk_rows = trial.rows
        self._step(batch)
        if not self._on_gpu:
            self._weighs = True
            self._step(batch)
            self._weighs = False
        trial.seconds.clear()
        started_s = time.perf_counter()
        for _ in range(REPEATS):
            self._step(batch)
            if time.perf_counter() - started_s > LIMIT_S:
                break
        if self._on_gpu:
            self._keep(batch, trial)
        return trial

    def _keep(self, batch: Batch, trial: _Trial) -> None:
        """The same with the activations kept: only the backward pass differs, and what is held."""
        kept = self._trial = _Trial(trial.rows)
        for unit in self._engine.units:
            unit.keeps = unit.group.kind == "block"
        try:
            started_s = time.perf_counter()
            for _ in range(REPEATS):
                self._step(batch)
                if time.perf_counter() - started_s > LIMIT_S / 2:
                    break
        except torch.OutOfMemoryError:
            return
        finally:
            for unit in self._engine.units:
                unit.keeps = False
        trial.seconds["kept_backward"] = kept.seconds["backward"]
        trial.keeps, trial.kept_bytes = True, max(0, kept.held_bytes - trial.held_bytes)

    def _step(self, batch: Batch) -> None:
        self._marks, self._host_marks = {}, {}
        if self._on_gpu:
            torch.cuda._sleep(HEAD_START_CYCLES)  # the host runs ahead, as in a training
        self._mark("start")
        loss = self._mini(**batch.inputs()).loss
        self._mark("loss")
        loss.backward()
        self._mark("backward")
        self._update()
        self._wait()
        forward_s = self._between("enters", "leaves")
        backward_s = self._between("backward enters", "backward leaves")
        host_s = self._host_between("enters", "leaves")
        host_s += self._host_between("backward enters", "backward leaves")
        self._trial.took(
            forward=forward_s / COPIES,
            backward=backward_s / COPIES,
            host=host_s / COPIES if self._on_gpu else 0.0,
            outside_forward=max(0.0, self._between("start", "loss") - forward_s),
            outside_backward=max(0.0, self._between("loss", "backward") - backward_s),
            update=self._between("backward", "updated") / max(1, self._updated),
            whole=self._between("start", "backward"),
        )
        for parameter in self._mini.parameters():
            parameter.grad = None

    def _update(self) -> None:
        """The norm and the optimizer, of weights that live on the device."""
        if self._optimizer is not None:
            self._engine.clip_grad_norm(1.0)
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
            torch.cuda.reset_peak_memory_stats(self._device)
            self._held_bytes = torch.cuda.memory_allocated(self._device)
        elif self._weighs:
            trim_heap()
            self._held_bytes = measure_host_peak_anew() or 0

    def _backward_left(self) -> None:
        self._mark("backward leaves")
        if self._on_gpu:
            peak = torch.cuda.max_memory_allocated(self._device) - self._held_bytes
            self._trial.activation_bytes = max(self._trial.activation_bytes, peak)
        elif self._weighs and self._held_bytes:
            peak = (recent_host_peak_bytes() or 0) - self._held_bytes
            self._trial.activation_bytes = max(self._trial.activation_bytes, peak)

    def _mark(self, name: str) -> None:
        """The time now: the host's, or that of the device's stream."""
        now: Any = time.perf_counter()
        self._host_marks.setdefault(name, []).append(now)
        if self._on_gpu:
            now = torch.cuda.Event(enable_timing=True)
            now.record(torch.cuda.current_stream(self._device))
        self._marks.setdefault(name, []).append(now)

    def _between(self, start: str, end: str) -> float:
        """Seconds from each mark `start` to its mark `end`, added up."""
        pairs = zip(self._marks[start], self._marks[end], strict=True)
        if self._on_gpu:
            return float(sum(before.elapsed_time(after) for before, after in pairs)) / 1e3
        return float(sum(after - before for before, after in pairs))

    def _host_between(self, start: str, end: str) -> float:
        """The same by the host's clock: how long it took to queue the work."""
        pairs = zip(self._host_marks[start], self._host_marks[end], strict=True)
        return sum(after - before for before, after in pairs)

    def _wait(self) -> None:
        if self._on_gpu:
            torch.cuda.synchronize(self._device)


def _first_tensor(values: tuple[Any, ...]) -> Tensor:
    """The hidden states: the first input (or output) that a gradient reaches."""
    for value in values:
        if isinstance(value, Tensor) and value.requires_grad:
            return value
    raise NotCalibrated("no gradient reaches its blocks")


def _give_back(device: torch.device) -> None:
    """Free what the miniature held: the plan counts what is free."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    trim_heap()
