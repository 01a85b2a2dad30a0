"""The events of a job: its run's journal and the queue's notes, as the API shows them."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from fastapi.concurrency import run_in_threadpool

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
from fluxtrain.events.journal import read_events, tail_lines
from fluxtrain.events.reader import JournalFollower
from fluxtrain.events.run_folder.run_dir import RunDir
from fluxtrain.serve.refusal import Refusal, without_folders
from fluxtrain.serve.registry import CHECKPOINT, model_name
from fluxtrain.serve.store import Store

FIRST_BYTES = 1 << 18
POLL_S = 1.0  # of one reader; many cost the training beside them little
NUMBERED = (StepFinished, EvaluationFinished, CheckpointWritten)
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


async def followed(
    store: Store, find: Callable[[], dict[str, Any]], run: RunDir, cursor: str
) -> AsyncIterator[str]:
    """Yield a job's events as server-sent events until it has ended.

    Args:
        store: where the row is; it is read again after a change alone.
        find: reads the job's row.
        cursor: the id of the last one that the client has: the journal's number and the count of
            notes; "" for all.
    """
    seq, _, told = cursor.partition(".")
    last_seq, notes = int(seq) if seq.isdecimal() else 0, int(told) if told.isdecimal() else 0
    follower, seen = JournalFollower(run.journal), -1
    row: dict[str, Any] = {}
    while True:
        if seen != (changes := store.changes):
            try:
                row, seen = await run_in_threadpool(find), changes
            except Refusal as error:
                if error.status != 503 or not row:
                    raise  # else the database is away: what the run tells goes on
        for _, note in list(_notes(row))[notes:]:
            notes += 1
            yield _sse_event(f"{last_seq}.{notes}", note)
        events = follower.poll()
        for event in events:
            made = api_event(row["id"], event) if event.seq > last_seq else None
            last_seq = max(last_seq, event.seq)
            if made is not None:
                yield _sse_event(f"{last_seq}.{notes}", made)
        if row["outcome"] is not None and not events:
            return
        if not events:
            await asyncio.sleep(POLL_S)


def _sse_event(cursor: str, event: dict[str, Any]) -> str:
    return f"id: {cursor}\ndata: {json.dumps(event)}\n\n"


def checkpoints_of(row: Mapping[str, Any], run: RunDir) -> list[dict[str, Any]]:
    """Return the checkpoints that a job's run has kept, newest first."""
    steps = sorted((int(path.name[5:]) for path in run.checkpoints.glob("step-*")), reverse=True)
    told: dict[int, dict[str, Any]] = {step: {"step": step} for step in steps}
    written_s = dict.fromkeys(steps, 0.0)
    for event in read_events(run.journal) if steps else ():
        if not isinstance(event, NUMBERED) or event.step not in told:
            continue
        at = told[event.step]
        if isinstance(event, StepFinished):
            at["train_loss"] = event.loss
        elif isinstance(event, EvaluationFinished):
            at["valid_loss"] = at["full_valid_loss"] = event.loss
        else:
            written_s[event.step] = event.wall_s
    return [
        {
            "id": f"ftckpt-{row['id']}-{step}",
            "object": "fine_tuning.job.checkpoint",
            "created_at": int(written_s[step]),
            "fine_tuning_job_id": row["id"],
            "fine_tuned_model_checkpoint": f"{model_name(row)}{CHECKPOINT}{step}",
            "step_number": step,
            "metrics": {key: one for key, one in told[step].items() if _is_finite(one)},
        }
        for step in steps
    ]


def api_event(job_id: str, event: AnyEvent) -> dict[str, Any] | None:
    """Return an event of a run as one of the API; None for events that it does not show."""
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
    event_id = f"ftevent-{job_id}-{event.seq}"
    return _event(event_id, event.wall_s, level, without_folders(text), kind, data)


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
    latest_s = 0.0  # a clock that was set back does not change the order
    for line in lines:
        event = decode_line(line)
        shown = None if event is None else api_event(job_id, event)
        if event is not None and shown is not None:
            latest_s = max(latest_s, event.wall_s)
            yield (latest_s, event.seq), shown


def _notes(row: Mapping[str, Any]) -> Iterator[tuple[Any, dict[str, Any]]]:
    notes = [[row["created_s"], "info", "Created: the data was read and the plan fits"]]
    for number, (at_s, level, text) in enumerate([*notes, *row["notes"]]):
        yield (at_s, number), _event(f"ftevent-{row['id']}-n{number}", at_s, level, text)


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0
