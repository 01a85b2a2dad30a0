"""The input of a panel: the run, the machine, the clock and the chart settings."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from fluxtrain.events.events import Event
from fluxtui.state.freshness import age_s, fresh, limit_s
from fluxtui.state.machine_sample import MachineSample
from fluxtui.state.run import FoldedRun
from fluxtui.state.samples import round_at
from fluxtui.state.status import Link, Status, status_of
from fluxtui.state.timeline import Timeline

Kind = TypeVar("Kind", bound=Event)
MACHINE_LIMIT_S = 5.0


@dataclass(frozen=True, slots=True)
class ChartSettings:
    """The user's settings of the curves."""

    smooth: bool = True
    log_scale: bool = False
    zoom: float = 1.0  # the share of the steps that is drawn, the newest
    last_step: int | None = None  # the newest of the steps that are looked through; None follows
    crosshair: int | None = None  # the step whose values are read; None shows no crosshair
    block: int | None = None  # the block that is looked into
    by_tokens: bool = False  # the x axis counts trained tokens instead of steps


@dataclass(frozen=True, slots=True)
class ComparedRun:
    """Another run whose curves are drawn beside this one's."""

    name: str
    state: FoldedRun


@dataclass(frozen=True, slots=True)
class View:
    """One moment of one run, as the screens draw it."""

    state: FoldedRun = field(default_factory=FoldedRun)
    link: Link = field(default_factory=Link)
    machine_sample: MachineSample | None = None
    wall_s: float = 0.0  # the clock on the wall
    monotonic_s: float = 0.0  # the clock that nobody sets
    boot: str = ""  # of this machine, from which that clock counts
    chart: ChartSettings = field(default_factory=ChartSettings)
    read_only: bool = False
    advice_at: int = 0  # which piece of advice is selected, the best first
    compared: ComparedRun | None = None
    timeline: Timeline = field(default_factory=Timeline)
    key_texts: Mapping[str, str] = field(default_factory=dict)  # the user's own, by action
    pictures: bool = True  # may be drawn: there are colours for them

    @property
    def now_s(self) -> float:
        """Return the present of the run: its last event's time, if it has ended or is replayed."""
        last = self.state.last_wall_s
        if last is not None and (self.link.replay or self.closed_in_order):
            return last
        now_s = self.state.clock.now_s(self.monotonic_s, self.boot)
        return self.wall_s if now_s is None else now_s

    @property
    def clock_s(self) -> float:
        """Return the wall-clock time of the present, for times of day."""
        return self.now_s if self.link.replay or self.closed_in_order else self.wall_s

    @property
    def closed_in_order(self) -> bool:
        return self.state.done is not None or self.state.failed is not None

    @property
    def on_gpu(self) -> bool:
        """Return whether the run trains on a GPU; before it reports, whether this
        machine has one."""
        if self.state.hello is not None:
            return self.state.hello.device != "cpu"
        return self.machine_sample is None or bool(self.machine_sample.gpus)

    @property
    def cards(self) -> int:
        """Return the number of cards that the run computes on; 1 until it reports."""
        state = self.state
        if state.planned is not None and state.planned.cards:
            return len(state.planned.cards)
        return max(1, len(state.memory.cards) if state.memory is not None else 0)

    @property
    def ranks(self) -> int:
        """Return the number of processes that train together; 1 until they report."""
        return max(1, len(self.state.step.ranks) if self.state.step is not None else 0)

    @property
    def devices(self) -> str:
        """Return what the run computes on, in words; "" until it reports."""
        hello, planned = self.state.hello, self.state.planned
        if hello is None or self.cards == 1:
            return "" if hello is None else hello.device
        if hello.device == "cpu":
            return f"cpu as {self.cards} cards"
        told = planned.cards if planned is not None else ()
        names = [card.name or hello.device for card in told] or [hello.device] * self.cards
        counts = {name: names.count(name) for name in names}
        return ", ".join(
            name if count == 1 else f"{count} x {name}" for name, count in counts.items()
        )

    @property
    def status(self) -> Status:
        return status_of(self.state, self.link, self.now_s)

    def fresh(self, event: Kind | None) -> Kind | None:
        """Return the event if it is still current, else None: a panel then draws "-".

        For a run that ended normally the last samples are shown, and the header says that it
        ended. For a killed run only facts stay true.
        """
        if event is None or self.closed_in_order:
            return event
        if self.link.process == "dead" and limit_s(event) is not None:
            return None
        limit = limit_s(event)
        if limit is not None and not self.link.replay and self.link.quiet_s > limit:
            return None  # whatever the clock says
        return fresh(event, self.now_s)

    def looked_at(self, by: int) -> int | None:
        """Return the step to look at, `by` steps from the present one; None if it is the newest."""
        steps = list(self.state.steps)
        if not steps:
            return None
        oldest, newest = steps[0].step, steps[-1].step
        at = self.chart.last_step if self.chart.last_step is not None else newest
        wanted = max(min(newest, oldest - by - 1), at + by) if by < 0 else at + by
        return None if wanted >= newest else wanted

    def crosshair_moved(self, by: int) -> int | None:
        """Move the crosshair by `by` hundredths of the shown curve; it starts at the end."""
        buckets = self.state.loss.buckets
        if not buckets:
            return None
        at = len(buckets) - 1
        if self.chart.crosshair is not None:
            ends = [bucket.last for bucket in buckets]
            at = min(at, bisect_left(ends, self.chart.crosshair))
        stride = max(1, round(len(buckets) * self.chart.zoom / 100))
        return buckets[max(0, min(len(buckets) - 1, at + by * stride))].last

    def sample_moved(self, by: int) -> int | None:
        """Return the step of the samples `by` rounds on from those at the crosshair."""
        steps = [one.step for one in self.state.samples]
        shown = round_at(self.state.samples, self.chart.crosshair)
        if shown is None:
            return None
        return steps[max(0, min(len(steps) - 1, steps.index(shown.step) + by))]

    def block_moved(self, by: int) -> int | None:
        """Return the block `by` places on; None while no block is known."""
        sample = self.state.residency
        if sample is None or not sample.weights:
            return None
        return max(0, min(len(sample.weights) - 1, (self.chart.block or 0) + by))

    def age_s(self, event: Event | None) -> float | None:
        age = age_s(event, self.now_s)
        if age is None or self.link.replay or self.closed_in_order:
            return age
        return max(age, self.link.quiet_s)

    @property
    def machine(self) -> MachineSample | None:
        """Return the newest sample of this machine while it is current."""
        sample = self.machine_sample
        if sample is None or self.monotonic_s - sample.monotonic_s > MACHINE_LIMIT_S:
            return None
        return sample
