"""Holds the lines of the log that the user reads, while newer lines push old ones out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fluxtui.state.history import History
from fluxtui.state.run import LOG_LIMIT, LogLine

HELD_LIMIT = 3 * LOG_LIMIT


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
