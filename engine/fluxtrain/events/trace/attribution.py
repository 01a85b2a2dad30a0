"""Attributes the seconds of a step from its lanes: what was busy, what waited, and what binds.

Of several cards each has a partition of its own. The one that computes most is told as the step's,
because the others wait for it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from fluxtrain.events.trace.lanes import (
    BUSY_LANES,
    CARD_LANES,
    OTHER_CARDS,
    OTHER_RANKS,
    Interval,
    StepLanes,
    without_evaluation,
)
from fluxtrain.units import duration_text

LANE_NAMES = {
    "gpu": "computation",
    "h2d": "copies to the device",
    "d2h": "copies to the host",
    "cpu": "cpu optimizer",
    "disk": "disk",
    "host": "host",
    OTHER_CARDS: "other cards",
    OTHER_RANKS: "other processes",
}
CAUSE_LANES = {  # the lane that each cause of waiting waits for
    "weights": "h2d", "activations": "h2d", "gradients": "d2h", "update": "cpu",
    "moments": "cpu",
    "checkpoint": "disk", "disk": "disk", "data": "host", "host": "host", OTHER_CARDS: OTHER_CARDS,
    OTHER_RANKS: OTHER_RANKS,
}  # fmt: skip
_IDLE = {  # of lanes that are not this one's
    OTHER_CARDS: "idle beside others {}",
    OTHER_RANKS: "waits {} for other processes",
}
QUEUED_LATE = "queued late by the host"  # a GPU computed no faster than it got its work
SPILLED = "spilled"  # optimizer states, and what follows them, read from disk or written there
SATURATED = 0.9  # of a wait for updates, in which the disk is busy: then the disk binds
BINDS_FROM = 0.1  # of the step: a lane with shorter waits does not bind it
_PHASES = ("forward", "backward", "optimizer", "other")  # of the host's lane: no waiting
Span = tuple[float, float]  # start, stop


@dataclass(frozen=True, kw_only=True)
class CardTime:
    """One card's seconds of a step; `busy_s["gpu"]` and all of `waits_s` partition it."""

    card: int
    busy_s: dict[str, float]  # by lane of the card: gpu, h2d, d2h
    work_s: dict[str, float]  # of the computation, by kind
    waits_s: dict[str, float]  # by cause; cards: idle while another card computes
    queued_s: float = 0.0  # of the computation: only as fast as its work was queued

    @property
    def for_others_s(self) -> float:
        """Return the seconds in which the card was idle while another one computed."""
        return self.waits_s.get(OTHER_CARDS, 0.0)


@dataclass(frozen=True, kw_only=True)
class Attribution:
    """One step's seconds. `busy_s["gpu"]` and all of `waits_s` partition `length_s`; with several
    cards they are those of `card` and of the host."""

    step: int
    length_s: float
    busy_s: dict[str, float]  # by lane
    work_s: dict[str, float]  # of the computation, by kind
    waits_s: dict[str, float]  # of the computation, by cause; host: nothing else was recorded
    bound: str  # the lane that a shorter step needs first; host: most of it is nowhere recorded
    because: str
    aside: str = ""  # what else is worth telling of it
    evaluation_s: float = 0.0  # that followed; in none of the above
    queued_s: float = 0.0  # of the computation, on a GPU: only as fast as the host queued it
    card: int = 0  # of several, the one that computes most
    cards: tuple[CardTime, ...] = ()  # each, where there are several

    @property
    def told(self) -> str:
        """Say what bound the step, with its numbers."""
        return f"{self.because}, {self.aside}" if self.aside else self.because

    def waits_for(self, lane: str) -> float:
        """Return the seconds that the computation waited for a lane."""
        return sum(s for cause, s in self.waits_s.items() if CAUSE_LANES.get(cause, "host") == lane)


def attribute(step: StepLanes) -> Attribution:
    """Partition the step into computing and waiting, each wait with one cause.

    The computation waits while it is stalled, and while nothing of it runs. Where several causes
    hold at once, the first counts: a stall of the computation's stream, a wait of the thread that
    drives it, the disk, the data, another card that computes; what is left is that thread's own
    work. A stall for weights during which no copy runs and the optimizer does is a wait for the
    update that the copy needs.
    """
    step, evaluation_s = without_evaluation(step)
    if step.cards == 1:
        return replace(_attributed(step, []), evaluation_s=evaluation_s)
    every = [_lanes_of(step, card) for card in range(step.cards)]
    computing = [_computing(one.intervals) for one in every]
    found = [
        _attributed(
            one, _union(s for at, spans in enumerate(computing) if at != card for s in spans)
        )
        for card, one in enumerate(every)
    ]
    cards = tuple(
        CardTime(
            card=card, work_s=one.work_s, waits_s=one.waits_s, queued_s=one.queued_s,
            busy_s={lane: s for lane, s in one.busy_s.items() if lane in CARD_LANES},
        )
        for card, one in enumerate(found)
    )  # fmt: skip
    most = max(range(step.cards), key=lambda card: (found[card].busy_s["gpu"], -card))
    because = f"card {most}: {found[most].because}"
    aside = "; ".join(part for part in (found[most].aside, skew_text(cards, step.length_s)) if part)
    return replace(
        found[most], because=because, aside=aside, evaluation_s=evaluation_s, card=most, cards=cards
    )


def skew_text(cards: Sequence[CardTime], length_s: float) -> str:
    """Say which card was idle for longest while others computed; nothing below `BINDS_FROM`."""
    idle = max(cards, key=lambda one: (one.for_others_s, -one.card))
    share = idle.for_others_s / length_s if length_s > 0 else 0.0
    if share < BINDS_FROM:
        return ""
    return f"card {idle.card} idle beside others {duration_text(idle.for_others_s)} ({share:.0%})"


def _lanes_of(step: StepLanes, card: int) -> StepLanes:
    """Return a step with the lanes of one card, and those of the host."""
    mine = [one for one in step.intervals if one.lane not in CARD_LANES or one.card == card]
    return replace(step, intervals=mine)


def _computing(intervals: Sequence[Interval]) -> list[Span]:
    """Return when the computation of one card ran and was not stalled."""
    return _minus(_of(intervals, "gpu"), _of(intervals, "stall"))


def _attributed(step: StepLanes, beside: list[Span]) -> Attribution:
    """Partition the step of one card, while others compute during some spans."""
    lanes = {lane: _of(step.intervals, lane) for lane in BUSY_LANES}
    computing = _computing(step.intervals)
    left = _minus([(0.0, step.length_s)], computing)
    waits_s: dict[str, float] = {}
    weights_written = [one for one in step.intervals if (one.lane, one.kind) == ("cpu", "update")]
    updating = _minus(_union([_span(one) for one in weights_written]), lanes["h2d"])

    moving = [one for one in step.intervals if one.kind == SPILLED]
    states = _union([_span(one) for one in moving])

    def book(cause: str, spans: list[Span]) -> None:
        nonlocal left
        seconds = _length(spans)
        if cause == "update" and _length(_common(spans, states)) > SATURATED * seconds:
            cause = "disk"
        waits_s[cause] = waits_s.get(cause, 0.0) + seconds
        left = _minus(left, spans)

    for cause, spans in (*_causes(step.intervals), (OTHER_CARDS, beside)):
        mine = _common(left, spans)
        if cause == "weights":
            book("update", late := _common(mine, updating))
            mine = _minus(mine, late)
        book(cause, mine)
    waits_s["host"] = _length(left)
    waits_s = {cause: s for cause, s in waits_s.items() if s > 0}
    busy_s = {lane: _length(spans) for lane, spans in lanes.items()}
    busy_s["gpu"] = _length(computing)
    queued_s = _length(_common(computing, _of(step.intervals, "queue")))
    bound, because, aside = _bound(step.length_s, busy_s, waits_s, queued_s)
    stalled = _of(step.intervals, "stall")
    return Attribution(
        step=step.step, length_s=step.length_s, busy_s=busy_s,
        work_s=_work(step.intervals, stalled), waits_s=waits_s, bound=bound, because=because,
        aside=aside, queued_s=queued_s,
    )  # fmt: skip


def median_step(steps: Sequence[StepLanes]) -> StepLanes:
    """Return the step of median length without evaluation (of two, the longer); `steps` must not
    be empty."""
    return sorted(steps, key=lambda one: without_evaluation(one)[0].length_s)[len(steps) // 2]


def summary_lines(found: Attribution, title: str) -> list[str]:
    """Return the attribution as a table for people."""
    after = f", then {duration_text(found.evaluation_s)} of evaluation" * (found.evaluation_s > 0)
    lines = [f"{title}: step {found.step}, {duration_text(found.length_s)}{after}"]
    for one in found.cards:
        lines += _card_rows(one, found.length_s)
    for lane in BUSY_LANES:
        if found.cards and lane in CARD_LANES:
            continue
        busy_s, waits_s = found.busy_s[lane], found.waits_for(lane)
        note = _by_length(found.work_s) if lane == "gpu" else ""
        if waits_s > 0:
            note = f"waited for {duration_text(waits_s)}"
            note += f" by card {found.card}" * bool(found.cards)
        lines.append(_row(LANE_NAMES[lane], busy_s, found.length_s, note))
        if lane == "gpu" and found.queued_s > 0:
            lines.append(_row("  of it", found.queued_s, found.length_s, QUEUED_LATE))
    if not found.cards:
        waiting_s = sum(found.waits_s.values())
        causes = _by_length(found.waits_s)
        lines.append(_row("computation waits", waiting_s, found.length_s, causes))
    lines.append(f"  bound: {found.told}")
    return lines


def _card_rows(one: CardTime, whole_s: float) -> list[str]:
    """Return the rows of one of several cards."""
    name, waiting_s = f"card {one.card}", sum(one.waits_s.values())
    copies = ", ".join(
        f"{duration_text(one.busy_s[lane])} {way}"
        for lane, way in (("h2d", "up"), ("d2h", "down"))
        if one.busy_s[lane] > 0
    )
    return [
        _row(f"{name} computes", one.busy_s["gpu"], whole_s, _by_length(one.work_s)),
        *([_row("  of it", one.queued_s, whole_s, QUEUED_LATE)] if one.queued_s > 0 else []),
        _row(f"{name} waits", waiting_s, whole_s, _by_length(one.waits_s)),
        *([f"  {name} copies{'':<21}{copies}"] if copies else []),
    ]


def _by_length(seconds: dict[str, float]) -> str:
    """Return names with their times, the longest first."""
    ordered = sorted(seconds.items(), key=lambda pair: -pair[1])
    return ", ".join(f"{name} {duration_text(s)}" for name, s in ordered)


def _row(name: str, seconds: float, whole_s: float, note: str) -> str:
    share = f"{seconds / whole_s * 100:.0f} %" if whole_s > 0 else "-"
    text = duration_text(seconds) if seconds > 0 else "0 s"
    return f"  {name:<21}{text:>9}{share:>7}  {note}".rstrip()


def _bound(
    length_s: float, busy_s: dict[str, float], waits_s: dict[str, float], queued_s: float
) -> tuple[str, str, str]:
    """Return the lane that binds the step, the reason in words, and unrecorded time as an aside.

    A lane that the computation waits for, from `BINDS_FROM` of the step on, binds rather than the
    computation. Unrecorded time binds only if it is longer than both. The host binds instead of
    the computation where at least half of that was queued too slowly.
    """
    nobody_s = waits_s.get("host", 0.0)
    by_lane: dict[str, float] = {}
    for cause, seconds in waits_s.items():
        if cause != "host":
            lane = CAUSE_LANES.get(cause, "host")
            by_lane[lane] = by_lane.get(lane, 0.0) + seconds
    worst = max(by_lane, key=by_lane.__getitem__, default="gpu")
    waited_s = by_lane.get(worst, 0.0)
    whole, computing_s = duration_text(length_s), busy_s["gpu"]
    computing = f"{LANE_NAMES['gpu']} {duration_text(computing_s)}"
    if nobody_s > max(waited_s, computing_s):
        return "host", f"unrecorded {duration_text(nobody_s)} of {whole}, {computing}", ""
    aside = ""
    if nobody_s >= BINDS_FROM * length_s > 0:
        aside = f"unrecorded {duration_text(nobody_s)} ({nobody_s / length_s * 100:.0f} %)"
    if queued_s >= BINDS_FROM * length_s > 0:
        late = f"{duration_text(queued_s)} of it {QUEUED_LATE}"
        if waited_s < BINDS_FROM * length_s and queued_s >= computing_s / 2:
            return "host", f"{computing} of {whole}, {late}", aside
        late = f"{duration_text(queued_s)} of the computation {QUEUED_LATE}"
        aside = f"{aside}, {late}" if aside else late
    if waited_s < BINDS_FROM * length_s or not by_lane:
        return "gpu", f"{computing} of {whole}", aside
    waited = duration_text(waited_s)
    if worst == "host":
        causes = sorted(waits_s, key=lambda cause: -waits_s[cause])
        cause = next(c for c in causes if c != "host" and CAUSE_LANES.get(c, "host") == "host")
        return worst, f"host, the computation waits {waited} of {whole} for {cause}", aside
    if worst in _IDLE:
        return worst, f"{computing} of {whole}, {_IDLE[worst].format(waited)}", aside
    busy = f"{LANE_NAMES[worst]} {duration_text(busy_s[worst])} of {whole}"
    return worst, f"{busy}, the computation waits {waited} for it", aside


def _causes(intervals: Sequence[Interval]) -> Iterable[tuple[str, list[Span]]]:
    """Return the spans of waiting by cause, the most telling cause first."""
    for lane in ("stall", "host"):
        waits = [one for one in intervals if one.lane == lane and one.kind not in _PHASES]
        kinds = dict.fromkeys(one.kind for one in waits if one.kind != "data")
        for kind in kinds:
            yield kind, _union([_span(one) for one in waits if one.kind == kind])
    saving = [one for one in intervals if (one.lane, one.kind) == ("disk", "checkpoint")]
    yield "checkpoint", _union([_span(one) for one in saving])
    yield "data", _union([_span(one) for one in intervals if one.kind == "data"])


def _work(intervals: Sequence[Interval], stalled: list[Span]) -> dict[str, float]:
    kinds = dict.fromkeys(one.kind for one in intervals if one.lane == "gpu")
    return {
        kind: _length(
            _minus(
                _union([_span(o) for o in intervals if (o.lane, o.kind) == ("gpu", kind)]), stalled
            )
        )
        for kind in kinds
    }


def _span(one: Interval) -> Span:
    return one.start_s, one.stop_s


def _of(intervals: Sequence[Interval], lane: str) -> list[Span]:
    return _union([_span(one) for one in intervals if one.lane == lane])


def _union(spans: Iterable[Span]) -> list[Span]:
    """Merge spans into disjoint ones in order."""
    found: list[Span] = []
    for start, stop in sorted(spans):
        if found and start <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], stop)
        elif stop > start:
            found.append((start, stop))
    return found


def _common(a: Sequence[Span], b: Sequence[Span]) -> list[Span]:
    """Intersect two lists of disjoint spans in order."""
    found: list[Span] = []
    i = j = 0
    while i < len(a) and j < len(b):
        start, stop = max(a[i][0], b[j][0]), min(a[i][1], b[j][1])
        if start < stop:
            found.append((start, stop))
        if a[i][1] <= b[j][1]:
            i += 1
        else:
            j += 1
    return found


def _minus(a: Sequence[Span], b: Sequence[Span]) -> list[Span]:
    """Return the time of `a` outside `b`; both are disjoint spans in order."""
    found: list[Span] = []
    j = 0
    for start, stop in a:
        at = start
        while j < len(b) and b[j][1] <= at:
            j += 1
        k = j
        while k < len(b) and b[k][0] < stop:
            if b[k][0] > at:
                found.append((at, b[k][0]))
            at = max(at, b[k][1])
            k += 1
        if at < stop:
            found.append((at, stop))
    return found


def _length(spans: Iterable[Span]) -> float:
    return sum(stop - start for start, stop in spans)
