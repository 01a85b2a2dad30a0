"""Limits how long a value is shown: after that the screen says "-" and the age."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

from fluxtrain.events.events import (
    Event,
    Heartbeat,
    Hello,
    MeasuringChange,
    MemorySampled,
    MovesMade,
    ResidencySampled,
    StepFinished,
    TrafficSampled,
)
from fluxtrain.events.run_folder.states import HEARTBEAT_LATE_S

Kind = TypeVar("Kind", bound=Event)

LIMITS_S: dict[type[Event], float] = {
    MemorySampled: 10.0,
    TrafficSampled: 10.0,
    ResidencySampled: 10.0,
    MovesMade: 10.0,
    Heartbeat: HEARTBEAT_LATE_S,
    MeasuringChange: float("inf"),  # a count of steps is true until the next step
}
SLOWEST_STEP_FACTOR = 5.0  # a step's rates hold until a few more steps should have ended
STEP_FLOOR_S = 30.0


def age_s(event: Event | None, now_s: float) -> float | None:
    """Return the seconds since the event, never negative (clocks of two machines differ
    a little)."""
    return None if event is None else max(0.0, now_s - event.wall_s)


def limit_s(event: Event) -> float | None:
    """Return the age after which an event says nothing about now; None for facts that stay true."""
    if isinstance(event, StepFinished):
        return max(STEP_FLOOR_S, SLOWEST_STEP_FACTOR * event.step_s)
    return LIMITS_S.get(type(event))


def fresh(event: Kind | None, now_s: float) -> Kind | None:
    """Return the event if it is young enough to be shown as the present, else None."""
    if event is None:
        return None
    limit, age = limit_s(event), age_s(event, now_s)
    return event if limit is None or age is None or age <= limit else None


SET_S = 0.5  # a difference beyond it is a clock that was set; below it clocks only drift


@dataclass(frozen=True, slots=True)
class SteadyClock:
    """Computes a process's Unix time from its first wall-clock reading and its monotonic clock."""

    process: tuple[int, float] | None = None
    offset_s: float | None = None  # from the monotonic clock to Unix time
    boot: str = ""  # the boot that the monotonic clock counts from

    def after(self, event: Event) -> SteadyClock:
        """Return the clock of the process that sent `event`: a hello begins a new one."""
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
        """Return the present on this clock, from the monotonic clock of this machine; None if the
        event came from another machine or before a reboot."""
        if self.offset_s is None or not boot or boot != self.boot:
            return None
        return self.offset_s + monotonic_s
