"""A look at a run's journal: its first line and its end, without reading what is between."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fluxtrain.files.opening import open_plain
from fluxtrain.telemetry.events import (
    AnyEvent,
    Done,
    Failed,
    Heartbeat,
    Hello,
    PhaseChanged,
    RunPhase,
    StepFinished,
)
from fluxtrain.telemetry.frames import SchemaTooNew, decode_line
from fluxtrain.telemetry.journal import tail_lines


def _glance(line: bytes) -> AnyEvent | None:
    """Summarise a run for a list; a run of a newer version is listed without its numbers."""
    try:
        return decode_line(line)
    except SchemaTooNew:
        return None


def first_hello(journal: Path) -> Hello | None:
    """Return how a run began; None where its journal does not tell."""
    try:
        with open_plain(journal) as file:
            event = _glance(file.read(1 << 16).partition(b"\n")[0])
    except OSError:
        return None
    return event if isinstance(event, Hello) else None


def newest_step(journal: Path) -> StepFinished | None:
    """Return the newest step in the journal's end."""
    for line in tail_lines(journal):
        if b'"step"' in line and isinstance(event := _glance(line), StepFinished):
            return event
    return None


def newest_t_s(journal: Path) -> float | None:
    """Return the trainer's monotonic clock at the newest event in the journal's end."""
    for line in tail_lines(journal):
        if (event := _glance(line)) is not None:
            return event.t_s
    return None


def newest_phase(journal: Path) -> RunPhase | None:
    """Return the newest phase that the run told in the journal's end."""
    for line in tail_lines(journal):
        if b'"phase"' in line and isinstance(event := _glance(line), Heartbeat | PhaseChanged):
            return event.phase
    return None


def ending_of_journal(journal: Path) -> dict[str, Any]:
    """Return the content of Done or Failed, if the journal ends with one."""
    ending: dict[str, Any] = {}
    for line in tail_lines(journal)[:16]:
        event = _glance(line)
        if isinstance(event, Hello | StepFinished):
            break
        if isinstance(event, Done | Failed):
            ending.setdefault("exit_code", event.exit_code)
        if isinstance(event, Failed):
            ending.setdefault("message", event.message)
            ending.setdefault("refused", event.refused)
    return ending
