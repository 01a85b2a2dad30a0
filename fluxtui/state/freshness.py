"""Limits how long a value is shown: after that the screen says "-" and the age."""

from __future__ import annotations

from typing import TypeVar

from fluxtrain.events.events import (
    Event,
    Heartbeat,
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
    """Seconds since the event, never negative (clocks of two machines differ a little)."""
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
