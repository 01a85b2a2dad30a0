"""Times of events by a clock that nobody sets, so that no age jumps when the wall clock does."""

from __future__ import annotations

from dataclasses import dataclass

from fluxtrain.events.events import Event, Hello

SET_S = 0.5  # a difference beyond it is a clock that was set; below it clocks only drift


@dataclass(frozen=True, slots=True)
class SteadyClock:
    """Unix time as a process's wall clock told it at first, with what passed since by its monotonic
    clock."""

    process: tuple[int, float] | None = None
    offset_s: float | None = None  # from the monotonic clock to Unix time
    boot: str = ""  # the boot that the monotonic clock counts from

    def after(self, event: Event) -> SteadyClock:
        """Return the clock of the process that tells `event`: a new one begins with its hello."""
        if not isinstance(event, Hello) or self.process == (event.pid, event.pid_start_s):
            return self
        offset_s = event.wall_s - event.t_s if event.t_s > 0 else None
        return SteadyClock((event.pid, event.pid_start_s), offset_s, event.boot)

    def time_of(self, event: Event) -> float:
        """Return when an event happened; its own time where the clock was not set meanwhile."""
        if self.offset_s is None or event.t_s <= 0:
            return event.wall_s
        steady_s = self.offset_s + event.t_s
        return steady_s if abs(event.wall_s - steady_s) > SET_S else event.wall_s

    def now_s(self, monotonic_s: float, boot: str) -> float | None:
        """Return the present on this clock by the monotonic clock of the machine that asks; None
        where that is another machine, or was started anew since."""
        if self.offset_s is None or not boot or boot != self.boot:
            return None
        return self.offset_s + monotonic_s
