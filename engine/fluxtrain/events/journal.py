"""The journal: every lifecycle event of a run, in order, without a gap in `seq`.

`seq` counts journal frames (1, 2, 3 ...) and goes on after a resume, so a reader can check that
nothing is missing. A process killed in the middle of a line leaves a torn tail: readers stop before
it, and the next writer cuts it off.
"""

from __future__ import annotations

import contextlib
import io
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fluxtrain.errors import BadInput
from fluxtrain.events.events import (
    FRAME_LIMIT_BYTES,
    AnyEvent,
    Done,
    EvaluationFinished,
    Event,
    Failed,
    Heartbeat,
    Hello,
    PhaseChanged,
    RunPhase,
    StepFinished,
)
from fluxtrain.events.frames import SchemaTooNew, Skipped, classify_line, decode_line
from fluxtrain.files.atomic import storage_error
from fluxtrain.files.opening import open_plain, open_to_write
from fluxtrain.units import bytes_text

TAIL_BYTES = 64 * FRAME_LIMIT_BYTES
_EVALUATION = b'"evaluation"'
ENDING_LINES = 16  # Done and Failed are among the last
TORN_LIMIT_BYTES = 256 << 20  # far more than a writer that was killed leaves


class JournalWriter:
    """Appends whole frames. The lock of the run directory ensures one writer at a time."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._descriptor = open_to_write(path, os.O_RDWR | os.O_CREAT | os.O_APPEND)
        except OSError as error:
            raise storage_error(path, error) from error
        self._end = self._cut_torn_tail()
        newest = next(filter(None, map(decode_line, tail_lines(path))), None)
        self.last_seq = newest.seq if newest is not None else 0

    def append(self, frame: bytes) -> None:
        """Hand one whole frame to the operating system, or raise `NoSpace` and leave no trace."""
        written = 0
        try:
            while written < len(frame):
                written += os.write(self._descriptor, frame[written:])
        except OSError as error:
            with contextlib.suppress(OSError):
                os.ftruncate(self._descriptor, self._end)
            raise storage_error(self.path, error, len(frame)) from error
        self._end += written

    def close(self) -> None:
        """Make the journal survive a power cut, then close it."""
        if self._descriptor >= 0:
            with contextlib.suppress(OSError):
                os.fsync(self._descriptor)
            os.close(self._descriptor)
            self._descriptor = -1

    def _cut_torn_tail(self) -> int:
        size = os.fstat(self._descriptor).st_size
        end = size
        while end > 0:
            start = max(0, end - TAIL_BYTES)
            newline = os.pread(self._descriptor, end - start, start).rfind(b"\n")
            if newline >= 0:
                end = start + newline + 1
                break
            end = start
            if size - end > TORN_LIMIT_BYTES:
                os.close(self._descriptor)
                raise BadInput(
                    f"{self.path} has no line in its last {bytes_text(TORN_LIMIT_BYTES)}, so no "
                    "run wrote it: move it away, or choose another --run-dir"
                )
        if end < size:
            os.ftruncate(self._descriptor, end)
        return end


def read_events(path: Path, on_skipped: list[Skipped] | None = None) -> Iterator[AnyEvent]:
    """Return all events of a journal; append the reasons of skipped lines to `on_skipped`.

    A torn last line is ignored. Raises `SchemaTooNew` for another major version of the schema.
    """
    with io.BufferedReader(open_plain(path, follow=True)) as file:
        for line in file:
            if not line.endswith(b"\n"):
                return
            event = classify_line(line)
            if not isinstance(event, Skipped):
                yield event
            elif on_skipped is not None:
                on_skipped.append(event)


def tail_lines(path: Path, limit_bytes: int = TAIL_BYTES) -> list[bytes]:
    """Return the whole lines in a file's last `limit_bytes`, newest first; [] without a file."""
    try:
        with open_plain(path) as file:
            size = file.seek(0, os.SEEK_END)
            start = max(0, size - limit_bytes)
            file.seek(start)
            lines = file.read(limit_bytes).split(b"\n")
    except OSError:
        return []
    whole = lines[:-1] if start == 0 else lines[1:-1]
    return whole[::-1]


@dataclass(frozen=True)
class JournalEnd:
    """Facts from the end of a journal; None and {} where it has none."""

    last: AnyEvent | None = None  # the newest event
    step: StepFinished | None = None
    phase: RunPhase | None = None
    ending: dict[str, Any] = field(default_factory=dict)  # exit_code, message, refused
    done: Done | None = None
    evaluation: EvaluationFinished | None = None  # as far back as the read part goes


def read_end(journal: Path) -> JournalEnd:
    """Read the newest of each from a journal's end alone; events of newer schemas are passed."""
    last = step = phase = done = None
    lines = tail_lines(journal)
    ending: dict[str, Any] = {}
    may_end = True  # only what follows the last step is an ending
    for at, line in enumerate(lines):
        event = _glance(line)
        if event is None:
            continue
        last = last or event
        may_end = may_end and at < ENDING_LINES and not isinstance(event, Hello | StepFinished)
        if isinstance(event, Done | Failed) and may_end:
            ending.setdefault("exit_code", event.exit_code)
            done = event if isinstance(event, Done) else done
            if isinstance(event, Failed):
                ending.setdefault("message", event.message)
                ending.setdefault("refused", event.refused)
        elif isinstance(event, StepFinished):
            step = step or event
        elif isinstance(event, Heartbeat | PhaseChanged):
            phase = phase or event.phase
        if step is not None and phase is not None:
            break
    return JournalEnd(last, step, phase, ending, done, _newest_evaluation(lines))


def newest_events(journal: Path, kinds: tuple[type[Event], ...]) -> dict[type[Event], Event]:
    """Return the newest event of each kind that a journal's end has; {} without a journal."""
    tags = {f'{{"event":"{kind.__struct_config__.tag}"'.encode(): kind for kind in kinds}
    found: dict[type[Event], Event] = {}
    for limit_bytes in (
        4 * FRAME_LIMIT_BYTES,
        TAIL_BYTES,
    ):  # the first is enough but for long steps
        for line in tail_lines(journal, limit_bytes):
            kind = tags.get(line[: line.find(b",")])
            if kind is not None and kind not in found and (event := _glance(line)) is not None:
                found[kind] = event
        if len(found) == len(kinds):
            break
    return found


def _newest_evaluation(lines: list[bytes]) -> EvaluationFinished | None:
    """Return the newest evaluation from lines in reverse order."""
    events = (_glance(line) for line in lines if _EVALUATION in line)
    return next((event for event in events if isinstance(event, EvaluationFinished)), None)


def first_hello(journal: Path) -> Hello | None:
    """Return how a run began; None where its journal does not say."""
    try:
        with open_plain(journal) as file:
            event = _glance(file.read(1 << 16).partition(b"\n")[0])
    except OSError:
        return None
    return event if isinstance(event, Hello) else None


def _glance(line: bytes) -> AnyEvent | None:
    """Return the event of a line; None for a newer version of the schema, too."""
    try:
        return decode_line(line)
    except SchemaTooNew:
        return None
