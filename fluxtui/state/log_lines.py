"""The log as the user reads it: filtered, and held while newer lines push old ones out."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from fluxtui.state.history import History
from fluxtui.state.run import LOG_LIMIT, Level, LogLine

LEVELS: tuple[Level, ...] = ("debug", "info", "warning", "error")
HELD_LIMIT = 3 * LOG_LIMIT


@dataclass(frozen=True, slots=True)
class LogFilter:
    """All words must be in a line; level and kind count as words."""

    text: str = ""
    least: Level = "debug"
    kind: str = ""  # "" is any

    @property
    def words(self) -> list[str]:
        """Return the searched text in lower case."""
        return self.text.lower().split()

    def passes(self, entry: LogLine) -> bool:
        """Tell whether a line passes the filter."""
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


@dataclass(frozen=True, slots=True)
class HeldLog:
    """All lines since some time before the log was held; none of them is dropped."""

    lines: Sequence[LogLine]
    appended: int  # lines of the log up to the last of these, dropped ones included

    @classmethod
    def of(cls, log: History[LogLine]) -> HeldLog:
        """Hold the log as it is now."""
        return cls(list(log), log.total)

    def after(self, log: History[LogLine]) -> HeldLog:
        """Add newer lines, as long as none in between is lost and there is room."""
        new = log.total - self.appended
        if new < 0:  # another run's
            return HeldLog.of(log)
        if new == 0 or new > len(log) or len(self.lines) + new > HELD_LIMIT:
            return self
        return HeldLog([*self.lines, *log.last(new)], log.total)

    def newer(self, log: History[LogLine]) -> int:
        """Return how many lines came after the held ones."""
        return max(0, log.total - self.appended)
