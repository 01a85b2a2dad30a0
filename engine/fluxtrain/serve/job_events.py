"""The events of a job: its run's journal and the queue's notes, as the API shows them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from fluxtrain.events.events import (
    AnyEvent,
    CheckpointWritten,
    Done,
    EvaluationFinished,
    Failed,
    LogWritten,
    PhaseChanged,
    StepFinished,
    StoppedEarly,
)
from fluxtrain.events.frames import decode_line
from fluxtrain.events.journal import tail_lines
from fluxtrain.events.run_folder.run_dir import RunDir

FIRST_BYTES = 1 << 18
LEVELS = {"debug": "info", "info": "info", "warning": "warn", "error": "error"}


def events_of(row: Mapping[str, Any], run: RunDir, limit: int, after: str | None) -> list[Any]:
    """Return a job's newest events, or those before the event `after`; one more than `limit`
    where there are more."""
    most_bytes = FIRST_BYTES
    while True:
        lines = tail_lines(run.journal, most_bytes)
        found = sorted(
            [*_journal_events(row["id"], lines), *_notes(row)],
            key=lambda one: one[0],
            reverse=True,
        )
        events = [event for _, event in found]
        ids = [event["id"] for event in events]
        begin = ids.index(after) + 1 if after in ids else 0 if after is None else len(ids)
        whole = _size(run.journal) <= most_bytes
        if whole or len(events) - begin > limit:
            return events[begin : begin + limit + 1]
        most_bytes *= 4


def api_event(job_id: str, event: AnyEvent) -> dict[str, Any] | None:
    """Return an event of a run as one of the API; None for what it does not show."""
    level, kind, data = "info", "message", None
    if isinstance(event, StepFinished):
        kind, text = "metrics", f"Step {event.step}/{event.total_steps}: loss={event.loss:.4f}"
        data = {
            "step": event.step,
            "total_steps": event.total_steps,
            "train_loss": event.loss,
            "learning_rate": event.learning_rate,
            "tokens_per_s": event.tokens_per_s,
        }
    elif isinstance(event, EvaluationFinished):
        kind, text = "metrics", f"Step {event.step}: held-out loss={event.loss:.4f}"
        data = {"step": event.step, "valid_loss": event.loss}
    elif isinstance(event, CheckpointWritten):
        text = f"Checkpoint of step {event.step} was written"
    elif isinstance(event, PhaseChanged):
        text = f"The run is {event.phase}"  # its detail may name files of the server
    elif isinstance(event, StoppedEarly):
        text = f"Training stopped early after step {event.step}"
    elif isinstance(event, Failed):
        level, text = "error", event.message
    elif isinstance(event, Done):
        text = f"The trainer ended after step {event.step} with exit code {event.exit_code}"
    elif isinstance(event, LogWritten) and event.level in ("warning", "error"):
        level, text = LEVELS[event.level], event.text
    else:
        return None
    return _event(f"ftevent-{job_id}-{event.seq}", event.wall_s, level, text, kind, data)


def _event(
    event_id: str,
    at_s: float,
    level: str,
    text: str,
    kind: str = "message",
    data: dict[str, Any] | None = None,
) -> dict[str, Any]:
    known = {key: one if _is_finite(one) else None for key, one in (data or {}).items()}
    return {
        "id": event_id,
        "object": "fine_tuning.job.event",
        "created_at": int(at_s),
        "level": level,
        "message": text,
        "type": kind,
        "data": known or None,
    }


def _is_finite(value: Any) -> bool:
    return not isinstance(value, float) or math.isfinite(value)


def _journal_events(job_id: str, lines: list[bytes]) -> Iterator[tuple[Any, dict[str, Any]]]:
    for line in lines:
        event = decode_line(line)
        shown = None if event is None else api_event(job_id, event)
        if event is not None and shown is not None:
            yield (event.wall_s, event.seq), shown


def _notes(row: Mapping[str, Any]) -> Iterator[tuple[Any, dict[str, Any]]]:
    notes = [[row["created_s"], "info", "Created: the data was read and the plan fits"]]
    for number, (at_s, level, text) in enumerate([*notes, *row["notes"]]):
        yield (at_s, number), _event(f"ftevent-{row['id']}-n{number}", at_s, level, text)


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0
