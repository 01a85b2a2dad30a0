"""The lanes of the last steps, as the run's ring file has them."""

from __future__ import annotations

from dataclasses import dataclass

from fluxtrain.events.trace.ring import SLOTS, Recorded


@dataclass(frozen=True, slots=True)
class Timeline:
    """The records read from the ring; `exists` is False for a run without one."""

    exists: bool = False
    steps: tuple[Recorded, ...] = ()  # oldest first

    def at(self, step: int) -> Recorded | None:
        """Return a step's record, if it is still in the ring."""
        return next((one for one in reversed(self.steps) if one.head.step == step), None)

    def newest(self, until: int | None = None) -> Recorded | None:
        """Return the newest record, of a step up to `until` if given."""
        kept = (one for one in reversed(self.steps) if until is None or one.head.step <= until)
        return next(kept, None)


def chosen(timeline: Timeline, looked_at: int | None, until: int | None) -> Recorded | str:
    """Return the record to show, or in words why there is none.

    looked_at: the step that was asked for; None is the newest.
    until: the newest step that the viewer knows of (a replay is behind its file).
    """
    if not timeline.exists:
        return "this run keeps no timeline of its steps (no timeline.ring in its folder)"
    if looked_at is not None:
        found = timeline.at(looked_at)
        return found or f"the timeline of step {looked_at} is not there: {SLOTS} steps are kept"
    found = timeline.newest(until)
    if found is not None:
        return found
    return (
        f"its steps so far left the timeline: {SLOTS} steps are kept"
        if timeline.steps and until
        else "no step so far"
    )
