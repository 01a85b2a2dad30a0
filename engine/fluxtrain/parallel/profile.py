"""`--profile N`: traces of N steps for TensorBoard and Perfetto, and what communication took."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch.profiler import ProfilerActivity, profile

from fluxtrain.files.atomic import write_json

WARM_STEPS = 3  # before the first that is profiled
_COLLECTIVE = re.compile(r"^(?:gloo:|ncclDevKernel_|ncclKernel_)(\w+)")
_WORDS = {
    "allreduce": "all_reduce", "allgather": "all_gather", "reducescatter": "reduce_scatter",
    "alltoall": "all_to_all", "sendrecv": "all_to_all", "broadcast": "broadcast",
}  # fmt: skip
_OURS = {"fluxtrain::encode": "encode", "fluxtrain::decode": "decode"}
Span = tuple[float, float]


@dataclass(frozen=True)
class Ran:
    """Something that ran: an operation on the processor, or a kernel."""

    name: str
    start_us: float
    stop_us: float
    on_gpu: bool = False


class Communication(msgspec.Struct, frozen=True, kw_only=True):
    """What communication took in the profiled steps of one rank, in milliseconds a step."""

    steps: int
    step_ms: float
    compute_ms: float
    comm_ms: float
    comm_share: float  # of the step
    exposed_ms: float  # communication while nothing was computed
    overlap: float  # share of the communication that computing hid
    by_operation_ms: dict[str, float]
    encode_ms: float
    decode_ms: float
    timing_valid: bool  # times of NCCL; gloo's are those of the processors

    @property
    def exposed_share(self) -> float:
        """Return the share of a step in which ranks communicate and compute nothing."""
        return self.exposed_ms / self.step_ms

    def table(self) -> str:
        """Return the numbers as lines of text."""
        rows = [
            ("operation", "ms a step", "of the step"),
            *((name, *self._told(ms)) for name, ms in sorted(self.by_operation_ms.items())),
            ("communication", *self._told(self.comm_ms)),
            ("  of it exposed", *self._told(self.exposed_ms)),
            ("computing", *self._told(self.compute_ms)),
            ("encode", *self._told(self.encode_ms)),
            ("decode", *self._told(self.decode_ms)),
            ("step", *self._told(self.step_ms)),
        ]
        lines = [f"{name:<18} {ms:>10} {share:>12}" for name, ms, share in rows]
        if not self.timing_valid:
            lines.append("these are times of gloo, on processors: they say nothing about a GPU")
        return "\n".join(lines)

    def _told(self, ms: float) -> tuple[str, str]:
        return f"{ms:.2f}", f"{ms / self.step_ms:.1%}"


def summarised(ran: Iterable[Ran], steps: int, seconds: float, *, gpu: bool) -> Communication:
    """Sum up what ran in `steps` steps of `seconds` in all."""
    events = list(ran)
    operations: dict[str, list[Span]] = {}
    compute: list[Span] = []
    ours = dict.fromkeys(_OURS.values(), 0.0)
    for event in events:
        span = event.start_us, event.stop_us
        operation = _operation(event.name)
        if operation is not None and event.on_gpu == gpu:
            operations.setdefault(operation, []).append(span)
        elif event.on_gpu == gpu and (gpu or event.name.startswith("aten::")):
            compute.append(span)
        if event.name in _OURS and event.on_gpu == gpu:
            ours[_OURS[event.name]] += event.stop_us - event.start_us
    every = [span for spans in operations.values() for span in spans]
    together, hidden = _length(every), _length(every) + _length(compute)
    exposed = together - (hidden - _length([*every, *compute]))
    each = 1e-3 / steps
    return Communication(
        steps=steps,
        step_ms=seconds * 1e3 / steps,
        compute_ms=_length(compute) * each,
        comm_ms=together * each,
        comm_share=together * 1e-6 / seconds,
        exposed_ms=exposed * each,
        overlap=1 - exposed / together if together else 0.0,
        by_operation_ms={name: _length(spans) * each for name, spans in operations.items()},
        encode_ms=ours["encode"] * each,
        decode_ms=ours["decode"] * each,
        timing_valid=gpu,
    )


def _operation(name: str) -> str | None:
    found = _COLLECTIVE.match(name)
    if found is None:
        return None
    word = found[1].replace("_", "").lower()
    return next((told for start, told in _WORDS.items() if word.startswith(start)), found[1])


def _length(spans: Sequence[Span]) -> float:
    """Return the length of the union of spans."""
    total, until = 0.0, float("-inf")
    for start, stop in sorted(spans):
        total += max(0.0, stop - max(start, until))
        until = max(until, stop)
    return total


class StepProfiler:
    """Profiles some steps of a run; `step_done` is called after each."""

    def __init__(self, folder: Path, steps: int, *, gpu: bool) -> None:
        """`folder` gets the trace, which TensorBoard and Perfetto open, and the numbers."""
        self._folder, self._steps, self._gpu = folder, steps, gpu
        self._seen = 0
        self._started_s = 0.0
        self._profile: Any = None
        self.found: Communication | None = None

    def step_done(self) -> Communication | None:
        """Count a step; return what the steps took once all are profiled."""
        self._seen += 1
        if self._seen == WARM_STEPS:
            self._profile = _profile(gpu=self._gpu)
            self._profile.__enter__()
            self._started_s = time.perf_counter()
        return self.end() if self._seen == WARM_STEPS + self._steps else None

    def end(self) -> Communication | None:
        """End the trace, and return what its steps took; None where no step was profiled since
        then, or none at all."""
        running, self._profile = self._profile, None
        if running is None:
            return None
        if self._gpu:
            torch.cuda.synchronize()
        seconds = time.perf_counter() - self._started_s
        running.__exit__(None, None, None)
        steps = self._seen - WARM_STEPS
        if steps:
            self._folder.mkdir(parents=True, exist_ok=True)
            running.export_chrome_trace(str(self._folder / "rank-0.pt.trace.json"))
            self.found = summarised(_ran(running), steps, seconds, gpu=self._gpu)
            write_json(self._folder / "communication.json", msgspec.to_builtins(self.found))
        return self.found


def profiled(act: Callable[[], object], *, gpu: bool) -> Communication:
    """Sum up what runs during `act`, as one step."""
    started_s = time.perf_counter()
    with _profile(gpu=gpu) as running:
        act()
        if gpu:
            torch.cuda.synchronize()
        seconds = time.perf_counter() - started_s
    return summarised(_ran(running), 1, seconds, gpu=gpu)


def _profile(*, gpu: bool) -> Any:
    kinds = [ProfilerActivity.CPU, *[ProfilerActivity.CUDA] * gpu]
    return profile(activities=kinds)


def _ran(ended: Any) -> list[Ran]:
    return [
        Ran(
            event.name,
            event.time_range.start,
            event.time_range.end,
            str(event.device_type).endswith("CUDA"),
        )
        for event in ended.events()
    ]
