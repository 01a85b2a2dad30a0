"""The lanes of steps as a trace for Perfetto (ui.perfetto.dev) and chrome://tracing.

JSON in the Trace Event Format: one process a run, one thread a lane (of several cards, a lane of a
card), a complete ("X") event an interval, with times in microseconds. Two uploads can overlap; the
later one then gets a thread of its own, because events of one thread must be nested or disjoint.
https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
"""

from __future__ import annotations

import contextlib
import errno
import gzip
import os
import stat
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, BinaryIO, cast

import msgspec

from fluxtrain.errors import BadInput, FluxTrainError
from fluxtrain.events.run_folder.run_dir import RunDir, find_run
from fluxtrain.events.trace.attribution import attribute, median_step, summary_lines
from fluxtrain.events.trace.lanes import CARD_LANES, LANES, StepLanes
from fluxtrain.events.trace.ring import RingReader, read_ring
from fluxtrain.files.atomic import storage_error, whole_file
from fluxtrain.files.temporary import FULL

_BESIDE = "h2d beside"  # a thread in the trace, not a lane
THREADS = {
    "step": "step", "gpu": "gpu: computation", "stall": "gpu: waits",
    "queue": "gpu: queued late", "h2d": "h2d: to the device",
    _BESIDE: "h2d: beside those", "d2h": "d2h: to the host", "cpu": "cpu: optimizer",
    "disk": "disk", "host": "host: the loop",
}  # fmt: skip
VIEWER = "https://ui.perfetto.dev"
_PROCESS = 1
_APART_S = 5e-7  # half of what times are rounded to
_A_CARD = 100  # numbers of threads for each further card


def recorded_steps(run: str | Path) -> tuple[RunDir, list[StepLanes]]:
    """Find the run (see `find_run`) and read its last steps.

    Raises:
        BadInput: there is no such run, or it has no timeline.
    """
    run_dir = RunDir(run)
    if not run_dir.timeline.exists():
        run_dir = RunDir(find_run(str(run)))
    reader = RingReader(run_dir.timeline)
    reader.poll()
    if not reader.exists:
        raise BadInput(
            f"{run_dir.path} has no step timeline ({run_dir.timeline.name}): the run was made by "
            "an earlier version, or has not trained a step"
        )
    steps = read_ring(run_dir.timeline)
    if not steps:
        raise BadInput(f"{run_dir.timeline} holds no whole step yet: try again after the next one")
    return run_dir, steps


def trace_events(steps: Sequence[StepLanes], run_id: str) -> Iterator[dict[str, Any]]:
    """Return the events of a trace; time 0 is the beginning of the first step."""
    yield _named("process_name", 0, f"FluxTrain {run_id}")
    for at, (thread, title) in enumerate(_threads(max((s.cards for s in steps), default=1))):
        yield _named("thread_name", thread, title)
        yield {**_named("thread_sort_index", thread, ""), "args": {"sort_index": at}}
    first_s = steps[0].wall_s if steps else 0.0
    until_s: dict[int, float] = {}
    for step in steps:
        begin_s = step.wall_s - first_s
        left_out = {"merged": step.merged, "late": step.late, "dropped": step.dropped}
        yield _event("step", f"step {step.step}", begin_s, step.length_s, {
            "step": step.step, **{name: count for name, count in left_out.items() if count},
        })  # fmt: skip
        for one in step.intervals:
            name = f"{one.kind} {one.name}" if one.name else one.kind
            facts: dict[str, Any] = {"step": step.step, "kind": one.kind}
            if one.pieces > 1:
                facts["pieces"] = one.pieces
            lane, start_s = one.lane, begin_s + one.start_s
            if lane == "h2d":
                if start_s > until_s.get(one.card, 0.0) - _APART_S:
                    until_s[one.card] = start_s + one.duration_s
                else:
                    lane = _BESIDE
            yield _event(lane, name, start_s, one.duration_s, facts, one.card)


def write_trace(path: Path, steps: Sequence[StepLanes], run_id: str) -> int:
    """Write the trace of `steps`, compressed if the name ends in .gz; return its bytes.

    The file is whole or absent. Raises `BadInput` for a bad path and `NoSpace` on a full disk.
    """
    check_trace_path(path)
    try:
        with whole_file(path) as file:
            if path.suffix == ".gz":
                with gzip.GzipFile("", "wb", 6, file, mtime=0) as packed:
                    _write(cast("BinaryIO", packed), steps, run_id)
            else:
                _write(file, steps, run_id)
        return path.stat().st_size
    except OSError as error:
        raise _refused(path, error) from error


@contextlib.contextmanager
def traced(run_dir: RunDir, path: Path | None, complain: Callable[[str], None]) -> Iterator[None]:
    """Write the last steps of the run to `path` when the context ends, also by an error. Problems
    of the trace are reported, not raised: they must not hide how the run ended."""
    try:
        yield
    finally:
        if path is not None:
            try:
                _, steps = recorded_steps(run_dir.path)
                write_trace(path, steps, run_dir.run_id)
                complain(f"trace of {len(steps)} steps: {path} (open it at {VIEWER})")
            except FluxTrainError as error:
                complain(f"error: no trace was written: {error}")


def check_trace_path(path: Path) -> None:
    """Raise `BadInput` for a path that cannot become a trace file, before the run starts."""
    if path.is_dir():
        raise BadInput(f"{path} is a folder: name a file, as in {path / 'trace.json.gz'}")
    with contextlib.suppress(OSError):
        if not stat.S_ISREG(path.stat().st_mode):  # it would be replaced, for all programs
            raise BadInput(f"{path} is a pipe or a device, and a trace is a file: name another")
    if not path.parent.is_dir():
        raise BadInput(f"cannot write {path}: there is no folder {path.parent}: make it first")
    if not os.access(path.parent, os.W_OK):
        raise _refused(path, PermissionError(errno.EACCES, os.strerror(errno.EACCES)))


def _refused(path: Path, error: OSError) -> Exception:
    if error.errno in FULL:
        return storage_error(path, error)
    return BadInput(f"cannot write {path}: {error.strerror or error}: name another file")


def _write(file: BinaryIO, steps: Sequence[StepLanes], run_id: str) -> None:
    encoder = msgspec.json.Encoder()
    file.write(b'{"displayTimeUnit":"ms","otherData":')
    file.write(encoder.encode({"run": run_id, "began": steps[0].wall_s if steps else None}))
    file.write(b',"traceEvents":[')
    before = b"\n"
    for event in trace_events(steps, run_id):
        file.write(before + encoder.encode(event))
        before = b",\n"
    file.write(b"\n]}\n")


def _event(
    lane: str, name: str, start_s: float, duration_s: float, facts: dict[str, Any], card: int = 0
) -> dict[str, Any]:
    category = "h2d" if lane == _BESIDE else lane
    return {
        "name": name, "cat": category, "ph": "X", "pid": _PROCESS, "tid": _thread(lane, card),
        "ts": round(start_s * 1e6, 3), "dur": round(duration_s * 1e6, 3), "args": facts,
    }  # fmt: skip


def _named(what: str, thread: int, name: str) -> dict[str, Any]:
    return {"name": what, "ph": "M", "pid": _PROCESS, "tid": thread, "args": {"name": name}}


def _thread(lane: str, card: int = 0) -> int:
    return 0 if lane == "step" else 1 + (*LANES, _BESIDE).index(lane) + _A_CARD * card


def _threads(cards: int) -> Iterator[tuple[int, str]]:
    """Yield the number and the title of each thread, from the top of the viewer; the lanes of a
    card stand together."""
    yield _thread("step"), THREADS["step"]
    of_card = [lane for lane in THREADS if lane in (*CARD_LANES, _BESIDE)]
    for card in range(cards):
        for lane in of_card:
            name = THREADS[lane] if cards == 1 else f"card {card} {THREADS[lane]}"
            yield _thread(lane, card), name
    for lane, title in THREADS.items():
        if lane not in ("step", *of_card):
            yield _thread(lane), title


def summarised(run: str) -> tuple[str, dict[str, Any]]:
    """Say where the time of a run's last and median step went, for people and for programs.

    Raises:
        BadInput: there is no such run, or it has no timeline.
    """
    _, steps = recorded_steps(run)
    last, median = attribute(steps[-1]), attribute(median_step(steps))
    lines = [*summary_lines(last, "last"), *summary_lines(median, f"median of {len(steps)}")]
    return "\n".join(lines), {
        "steps": len(steps), "last": asdict(last), "median": asdict(median),
    }  # fmt: skip


def exported(run: str, output: Path | None) -> tuple[str, dict[str, Any]]:
    """Write a run's last steps as a trace (by default into its folder); return what was written.

    Raises:
        BadInput: there is no such run, it has no timeline, or `output` cannot be a trace.
        NoSpace: on a full disk.
    """
    run_dir, steps = recorded_steps(run)
    path = output or run_dir.path / "trace.json.gz"
    size = write_trace(path, steps, run_dir.run_id)
    facts = {"path": str(path), "bytes": size, "steps": len(steps)}
    return f"{path}: {len(steps)} steps; open it at {VIEWER}", facts
