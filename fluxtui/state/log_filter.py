"""Filters the lines of the log by words, lowest level and kind."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from fluxtui.state.run import Level, LogLine

LEVELS: tuple[Level, ...] = ("debug", "info", "warning", "error")


@dataclass(frozen=True, slots=True)
class LogFilter:
    """All words must be in a line; level and kind count as words."""

    text: str = ""
    least: Level = "debug"
    kind: str = ""  # "" is any

    @property
    def words(self) -> list[str]:
        """In lower case."""
        return self.text.lower().split()

    def passes(self, entry: LogLine) -> bool:
        """Whether a line is wanted."""
        if LEVELS.index(entry.level) < LEVELS.index(self.least):
            return False
        if self.kind and entry.kind != self.kind:
            return False
        whole = f"{entry.level} {entry.kind} {entry.text}".lower()
        return all(word in whole for word in self.words)

    def next_level(self) -> LogFilter:
        """Return the filter from the next level up; after the highest from all levels."""
        at = LEVELS.index(self.least) + 1
        return replace(self, least=LEVELS[at % len(LEVELS)])

    def next_kind(self, log: Iterable[LogLine]) -> LogFilter:
        """Return the filter for the next kind in alphabetical order; after the last, for any."""
        kinds = ["", *sorted({entry.kind for entry in log})]
        at = kinds.index(self.kind) + 1 if self.kind in kinds else 0
        return replace(self, kind=kinds[at % len(kinds)])
