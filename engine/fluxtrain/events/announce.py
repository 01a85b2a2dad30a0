"""Sends everything that a run reports to its journal, its live reader and the console."""

from __future__ import annotations

from collections.abc import Callable

from fluxtrain.errors import NoSpace
from fluxtrain.events.emitter import Emitter
from fluxtrain.events.events import (
    Event,
    Heartbeat,
    LogWritten,
    PhaseChanged,
    RunPhase,
    StepFinished,
)


class Announcer:
    """Emits events, shows them on the console, and knows the phase and step for heartbeats."""

    def __init__(self, emitter: Emitter, show: Callable[[Event], None]) -> None:
        self._emitter = emitter
        self._show = show
        self._listeners: list[Callable[[Event], None]] = []
        self._phase: RunPhase = "starting"
        self._step = 0
        self._rewrite: Callable[[Callable[[], None]], None] | None = None

    @property
    def current_phase(self) -> RunPhase:
        """Return the phase that was reported last."""
        return self._phase

    def rewrites_with(self, rewrite: Callable[[Callable[[], None]], None]) -> None:
        """Let `rewrite` repeat the writing of an event that the journal's full disk refused."""
        self._rewrite = rewrite

    def also_tell(self, listener: Callable[[Event], None]) -> None:
        """Give all events from now on to `listener` too, which must neither block nor raise."""
        self._listeners.append(listener)

    def emit(self, event: Event) -> None:
        """Write a lifecycle event. Raises NoSpace once when the journal's disk is full, after what
        `rewrites_with` was given did not help."""
        if isinstance(event, StepFinished):
            self._step = event.step
        self._show(event)
        for listener in self._listeners:
            listener(event)
        try:
            self._emitter.emit(event)
        except NoSpace:
            if self._rewrite is None:
                raise
            self._rewrite(lambda: self._emitter.journal_again(event))

    def gauge(self, event: Event) -> None:
        """Write a sample; never shown on the console, never raises for a full disk."""
        for listener in self._listeners:
            listener(event)
        self._emitter.emit(event)

    def phase(self, phase: RunPhase, detail: str = "") -> None:
        """Report that the run entered another phase."""
        self._phase = phase
        self.emit(PhaseChanged(phase=phase, detail=detail))

    def warn(self, text: str) -> None:
        """Report something that the user should know and that does not stop the run."""
        self.emit(LogWritten(level="warning", text=text))

    def at_step(self, step: int) -> None:
        """Note the step that a resumed run starts from."""
        self._step = step

    def heartbeat(self) -> Heartbeat:
        """Return the heartbeat event of this moment."""
        return Heartbeat(phase=self._phase, step=self._step)
