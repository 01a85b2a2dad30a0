"""The interface of a followed run. A source never blocks and does bounded work a call."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from fluxtrain.events.events import AnyEvent
from fluxtui.state.status import Link


@dataclass(frozen=True, slots=True)
class EventBatch:
    """The events since the last call, in order."""

    events: Sequence[AnyEvent]
    link: Link
    restarted: bool = False  # the journal is another one now: fold from the start
    more: bool = False  # there is more to read at once


class RunSource(Protocol):
    """A run to follow."""

    @property
    def run_dir(self) -> Path | None:
        """Return the folder of its files; None if it has none."""

    @property
    def controllable(self) -> bool:
        """Return whether commands can be sent to it."""

    def poll(self) -> EventBatch:
        """Return the news since the last call."""

    def close(self) -> None:
        """Stop following the run, which continues."""
