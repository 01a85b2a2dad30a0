"""The activity of every stream and thread during one step, as lanes over time.

Of several cards each has its own lanes, and a line its idle time while others computed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby
from typing import NamedTuple

from fluxtrain.events.trace.attribution import QUEUED_LATE, Attribution, attribute
from fluxtrain.events.trace.lanes import CARD_LANES, Interval, StepLanes, without_evaluation
from fluxtrain.events.trace.ring import Recorded
from fluxtrain.units import duration_text
from fluxtui.panels.card_colours import role_of
from fluxtui.panels.panel import Panel, pair, share_text, stale_note, whole_share
from fluxtui.panels.step import body as phases_body
from fluxtui.panels.step import heading as phases_heading
from fluxtui.state.timeline import chosen
from fluxtui.state.view import View
from fluxtui.widgets.spans import (
    BLANK,
    Line,
    Span,
    dropped_to_fit,
    fitted,
    joined,
    width_of,
    wrapped,
)

BRIGHT_FROM, QUIET_FROM = 0.5, 0.1
_TRACE, _EMPTY = "▪", "·"


@dataclass(frozen=True, slots=True)
class Kind:
    """How a kind of work is drawn."""

    letter: str
    role: str
    label: str


class Cell(NamedTuple):
    """The leading kind of one slice of time, and how much of the slice the lane was busy."""

    kind: str
    share: float

    @property
    def level(self) -> int:
        """Return the brightness: 3 bright, 2 quiet, 1 a trace, 0 nothing."""
        return _level(self.share)


_REST = Cell("", 0.0)


def _level(share: float) -> int:
    if share >= BRIGHT_FROM:
        return 3
    return 2 if share >= QUIET_FROM else 1 if share > 0 else 0


def cells_of(intervals: Sequence[Interval], length_s: float, width: int) -> list[Cell]:
    """Cut the step's time into `width` slices."""
    if width <= 0:
        return []
    if length_s <= 0:
        return [_REST] * width
    slice_s = length_s / width
    busy: list[dict[str, float] | None] = [None] * width
    for _, kind, _, start_s, duration_s, *_ in intervals:
        stop_s = start_s + duration_s
        first = min(width - 1, int(start_s / slice_s))
        last = min(width - 1, int(stop_s / slice_s))
        for i in range(first, last + 1):
            begins_s, ends_s = i * slice_s, (i + 1) * slice_s
            inside = (stop_s if stop_s < ends_s else ends_s) - (
                start_s if start_s > begins_s else begins_s
            )
            if inside > 0:
                kinds = busy[i]
                if kinds is None:
                    busy[i] = {kind: inside}
                else:
                    kinds[kind] = kinds.get(kind, 0.0) + inside
    return [_leading(kinds, slice_s) if kinds else _REST for kinds in busy]


def _leading(kinds: dict[str, float], slice_s: float) -> Cell:
    if len(kinds) == 1:
        [(kind, inside)] = kinds.items()
        return Cell(kind, min(1.0, inside / slice_s))
    return Cell(max(kinds, key=kinds.__getitem__), min(1.0, sum(kinds.values()) / slice_s))


def bar(cells: Sequence[Cell], kind_of: Callable[[str], Kind], empty: str = _EMPTY) -> Line:
    """Draw the cells as spans; a run of equal cells begins with its label, or its letter."""
    spans: list[Span] = []
    for (level, name), run in groupby([(_level(share), kind) for kind, share in cells]):
        count = len(list(run))
        if level == 0:
            spans.append((empty * count, "faint"))
            continue
        kind = kind_of(name)
        if level == 1:
            spans.append((_TRACE * count, f"soft:{kind.role}"))
        elif level == 2:
            spans.append(((kind.letter.lower() * count), f"tile:{kind.role}"))
        else:
            label = f" {kind.label} "
            text = label if len(label) <= count else kind.letter
            spans.append((text.ljust(count), f"on:{kind.role}"))
    return tuple(spans)


def ruler(length_s: float, width: int) -> Line:
    """Write times under the bars, from 0 to the step's length."""
    end = duration_text(length_s)
    count = max(1, min(4, width // 14))
    line = ["─"] * max(0, width)
    for i in range(count + 1):
        text = "0" if i == 0 else end if i == count else duration_text(length_s * i / count)
        at = min(round(i * width / count), width - len(text))
        at = at - len(text) // 2 if 0 < i < count else at
        if at >= 0 and at + len(text) <= width:
            line[at : at + len(text)] = text
    return (("".join(line), "axis"),)


BOUND = ("bound ", "dim")
LABEL_CELLS = 5
SECONDS_FROM_CELLS = 90
SHOWN = ("gpu", "queue", "wait", "h2d", "d2h", "cpu", "disk")
LABELS = {lane: lane for lane in SHOWN}
OFF_GPU = {"gpu": "dev", "h2d": "in", "d2h": "out"}
ROLES = {
    "gpu": "device", "queue": "stall", "h2d": "device", "d2h": "host", "cpu": "update",
    "disk": "disk",
}  # fmt: skip
KINDS = {
    "forward": Kind("F", "forward", "forward"),
    "head": Kind("H", "accent", "head"),
    "backward": Kind("B", "backward", "backward"),
    "gradients": Kind("G", "gradients", "gradients"),
    "update": Kind("U", "update", "update"),
    "moments": Kind("M", "optimizer", "moments"),
    "weights": Kind("W", "weights", "weights"),
    "activations": Kind("A", "activations", "activations"),
    "checkpoint": Kind("C", "disk", "checkpoint"),
    "spilled": Kind("S", "optimizer", "spilled"),
}
TALLEST = 3
LONGEST_FROM_ROWS = 6
BOUND_IN_HEADING_CELLS = 110  # from here on the heading has room for most of what binds a step
HEADING_LESS_CELLS = 12  # of the room in the body, at most: the frame and the title
COLUMN_GAP = 2


class Lane(NamedTuple):
    """A lane on the screen; `card` is None on a single card, and for the host's lanes."""

    name: str
    card: int | None = None


def heading(view: View, width: int) -> Line:
    """Say which step is shown, how long it took, and what bound it."""
    found = shown(view)
    if isinstance(found, str):
        phases = phases_heading(view, width - len("step "))
        return (("step ", "text"), *phases) if view.fresh(view.state.step) else phases
    looking_back = view.chart.last_step is not None
    parts: list[Line] = [
        ((f"step {found.head.step}", "warn" if looking_back else "text"),),
        ((duration_text(_attributed(found).length_s), "strong"),),
    ]
    if looking_back:
        parts.append((("looking back", "warn"),))
    elif view.fresh(view.state.step) is None:
        parts.append(stale_note(view.age_s(view.state.step)))
    if width >= BOUND_IN_HEADING_CELLS - 20:  # beside the title
        parts.append((BOUND, (_attributed(found).because, "text")))
        parts.append(((_attributed(found).aside, "dim"),) if _attributed(found).aside else BLANK)
    return dropped_to_fit(parts, width)


def body(view: View, width: int, height: int) -> list[Line]:
    """Draw the lanes; then, if there is room, waits by cause, times, bound and letters."""
    found = shown(view)
    if isinstance(found, str):
        return _without_lanes(view, found, width, height)
    on_gpu = view.on_gpu
    in_heading = width >= BOUND_IN_HEADING_CELLS and BOUND in heading(
        view, width - HEADING_LESS_CELLS
    )
    return list(_drawn(found, width, height, on_gpu, in_heading))[:height]


def _without_lanes(view: View, why: str, width: int, height: int) -> list[Line]:
    """Draw the phases of the last step from the journal, and say why there are no lanes."""
    told: list[Line] = [((text, "dim"),) for text in wrapped(why, max(1, width))]
    if view.chart.last_step is not None or view.state.step is None:
        return told[:height]
    phases = phases_body(view, width, 2)
    return [*phases, *told][:height] if height > len(phases) else phases[:height]


def shown(view: View) -> Recorded | str:
    """Return the step on screen, or the reason in words why there is none."""
    until = view.state.step.step if view.link.replay and view.state.step else None
    if view.state.step is None and (view.link.replay or not view.timeline.exists):
        return "no step so far"
    return chosen(view.timeline, view.chart.last_step, until)


@lru_cache(maxsize=64)
def _attributed(found: Recorded) -> Attribution:
    return attribute(found.lanes)


@lru_cache(maxsize=16)
def _drawn(
    found: Recorded, width: int, height: int, on_gpu: bool, bound_in_heading: bool
) -> tuple[Line, ...]:
    step, _ = without_evaluation(found.lanes)
    lanes = _lanes_for(step, height)
    columns = -(-len(lanes) // max(1, height - 1)) if step.cards > 1 else 1
    drawn = -(-len(lanes) // columns)
    foot = _foot(found, width, height - drawn, bound_in_heading)
    rows = max(1, min(TALLEST, (height - len(foot)) // max(1, drawn))) if columns == 1 else 1
    cell = (width - COLUMN_GAP * (columns - 1)) // columns
    bars = [_lane(step, _attributed(found), lane, cell, rows, on_gpu) for lane in lanes]
    lines: list[Line] = []
    if columns == 1:
        lines = [line for lane in bars for line in lane]
    else:
        beside = [joined([lane[0] for lane in bars[at::drawn]]) for at in range(drawn)]
        lines = [fitted(one, width) for one in beside]
    lines += foot
    return (*lines, *_longest(step, width, height - len(lines) - 1, on_gpu))


def _lanes_for(step: StepLanes, height: int) -> list[Lane]:
    """Return all lanes if there is room; else drop the waits, then idle lanes."""
    return _lanes_of_cards(step, height) if step.cards > 1 else [*map(Lane, _lanes(step, height))]


def _lanes_of_cards(step: StepLanes, height: int) -> list[Lane]:
    """Return each card's computation, then the lanes that have room with two lines below: the
    optimizer, a lane that is busy on any card, the disk."""
    busy = {one.lane for one in step.intervals}
    chosen = {"gpu"}
    left = height - 2 - step.cards
    for lane in ("cpu", "h2d", "d2h", "disk", "queue"):
        needed = step.cards if lane in CARD_LANES else 1
        if lane in busy and needed <= left:
            chosen.add(lane)
            left -= needed
    return [
        Lane(lane, card)
        for lane in SHOWN
        if lane in chosen
        for card in (range(step.cards) if lane in CARD_LANES else (None,))
    ]


def _lanes(step: StepLanes, height: int) -> list[str]:
    busy = {one.lane for one in step.intervals}
    lanes = [lane for lane in SHOWN if lane != "wait" and (lane != "queue" or lane in busy)]
    if height >= len(lanes) + 3 and "stall" in busy:
        return [lane for lane in SHOWN if lane == "wait" or lane in lanes]
    if height < len(lanes):
        lanes = [lane for lane in lanes if lane in busy or lane == "gpu"]
    return lanes[:height]


def _lane(
    step: StepLanes, found: Attribution, which: Lane, width: int, rows: int, on_gpu: bool
) -> list[Line]:
    """Draw a label, the bar (in the gpu's, stalls are "!"), and the busy share of the step."""
    lane, card = which
    wide = width >= SECONDS_FROM_CELLS
    room = width - LABEL_CELLS - (16 if wide else 6)
    if room < 4:
        return [fitted(((LABELS[lane], "text"),), width)]
    own = "stall" if lane == "wait" else lane
    mine = [one for one in step.intervals if card is None or one.card == card]
    intervals = [one for one in mine if one.lane == own]
    if lane == "gpu":
        waits = [one for one in mine if one.lane == "stall"]
        intervals += [one._replace(kind=f"!{one.kind}") for one in waits]
    bars = bar(cells_of(intervals, step.length_s, room), _kind_of(lane))
    waited_s = sum(found.waits_s.values()) - found.waits_s.get("host", 0.0)
    of = found if card is None else found.cards[card]
    busy_s = {**of.busy_s, "wait": waited_s, "queue": of.queued_s}[lane]
    share = share_text(busy_s / step.length_s if step.length_s > 0 else None)
    numbers = f"{share:>6}" + (f"{duration_text(busy_s) if busy_s else '0 s':>10}" if wide else "")
    role = ROLES.get(lane, "stall") if card is None else role_of(card)
    first: Line = (
        (f"{_label(lane, on_gpu, card):<{LABEL_CELLS}}", role),
        *bars,
        (numbers, "text"),
    )
    again: Line = ((" " * LABEL_CELLS, "text"), *_unlabelled(bars))
    return [first, *[again] * (rows - 1)]


def _label(lane: str, on_gpu: bool, card: int | None = None) -> str:
    """Return a lane's label, in the words of the machine that runs, with the number of its card."""
    name = LABELS[lane] if on_gpu else OFF_GPU.get(lane, LABELS[lane])
    return name if card is None else f"{name}{card}"


def _unlabelled(bars: Line) -> Line:
    """Return the bar again, without words in it."""
    return tuple(
        (" " * len(text), role) if role.startswith("on:") else (text, role) for text, role in bars
    )


def _kind_of(lane: str) -> Callable[[str], Kind]:
    def kind(name: str) -> Kind:
        if name.startswith("!"):
            return Kind("!", "stall", f"waits for {name[1:]}")
        known = KINDS.get(name, Kind((name[:1] or "?").upper(), "other", name))
        if lane in ("wait", "queue"):
            return Kind(known.letter.lower(), "stall", known.label)
        return known

    return kind


def _ruled(step: StepLanes, width: int) -> Line:
    room = width - LABEL_CELLS - (16 if width >= SECONDS_FROM_CELLS else 6)
    return ((" " * LABEL_CELLS, "axis"), *ruler(step.length_s, room)) if room >= 14 else BLANK


def _foot(found: Recorded, width: int, room: int, bound_in_heading: bool) -> list[Line]:
    """Return times, letters, waits and bound; if not all fit, the most telling ones."""
    step, _ = without_evaluation(found.lanes)
    wanted = [
        (2, _waits_line(_attributed(found), width)),
        (0, _ruled(step, width)),
        (1, _legend(step, width)),
    ]
    if step.cards > 1:  # what each card waited tells more than what one of them did
        wanted = [(2, _skew_line(_attributed(found), width)), *wanted[1:]]
    if not bound_in_heading:
        wanted.insert(0, (3, fitted(pair("bound", _attributed(found).told), width)))
    return [one for _, one in sorted(wanted[: max(0, room)], key=lambda place: place[0])]


def _longest(step: StepLanes, width: int, rows: int, on_gpu: bool) -> list[Line]:
    """Say which blocks took longest, if there is much room left."""
    if rows < LONGEST_FROM_ROWS:
        return []
    does = LABELS.keys() - {"queue"}
    ranked = sorted((one for one in step.intervals if one.lane in does), key=_by_duration)
    lines: list[Line] = [BLANK, fitted((("the longest, and when they began", "dim"),), width)]
    for one in ranked[: rows - 1]:
        share = share_text(one.duration_s / step.length_s if step.length_s > 0 else None)
        text: Line = (
            (f"{_label(one.lane, on_gpu, _card_of(step, one)):<{LABEL_CELLS}}", ROLES[one.lane]),
            (f"{one.kind:<12}", "text"),
            (f"{duration_text(one.duration_s):>9}", "strong"),
            (f"{share:>7}", "dim"),
            (f"{duration_text(one.start_s) if one.start_s > 0 else '0 s':>10}  ", "dim"),
            (one.name, "text"),
        )
        lines.append(fitted(text, width))
    return lines


def _card_of(step: StepLanes, one: Interval) -> int | None:
    """Return an interval's card; None on a single card."""
    return one.card if step.cards > 1 and one.lane in CARD_LANES else None


def _by_duration(one: Interval) -> float:
    return -one.duration_s


def _waits_line(found: Attribution, width: int) -> Line:
    """Say what the computation waited for, the longest first, and what is not drawn."""
    waits = sorted(found.waits_s.items(), key=lambda wait: -wait[1])
    whole_s = sum(seconds for _, seconds in waits)
    parts = [pair(cause, duration_text(seconds), "text") for cause, seconds in waits]
    if found.evaluation_s > 0:
        parts.insert(0, pair("then evaluation", duration_text(found.evaluation_s), "evaluation"))
    return dropped_to_fit([pair("waits", duration_text(whole_s)), *parts], width)


def _skew_line(found: Attribution, width: int) -> Line:
    """Say how long each card was idle while another one computed; with less room, what share."""
    long: list[Line] = []
    short: list[Line] = []
    for one in found.cards:
        share = one.for_others_s / found.length_s if found.length_s > 0 else None
        waited = duration_text(one.for_others_s) if one.for_others_s > 0 else "0 s"
        name: Line = ((f"{one.card} ", role_of(one.card)),)
        long.append((("card ", "dim"), *name, (waited, "text"), (f" {share_text(share)}", "dim")))
        short.append((*name, (whole_share(share), "text")))
    told: Line = (("idle beside others", "dim"),)
    ways = ([told, *long], [told, *short], [(("idle", "dim"),), *short])
    fits = (way for way in ways if width_of(joined(way)) <= width)
    return dropped_to_fit(next(fits, ways[-1]), width)


def _legend(step: StepLanes, width: int) -> Line:
    """Explain the letters in use, and say what the record dropped."""
    used = dict.fromkeys(one.kind for one in step.intervals if one.lane in LABELS)
    parts: list[Line] = [
        ((f" {KINDS[kind].letter} ", f"on:{KINDS[kind].role}"), (f" {KINDS[kind].label}", "dim"))
        for kind in KINDS
        if kind in used
    ]
    if any(one.lane == "stall" for one in step.intervals):
        parts.append(((" ! ", "on:stall"), (" waits", "dim")))
    if any(one.lane == "queue" for one in step.intervals):
        parts.append((("queue", "stall"), (f" {QUEUED_LATE}", "dim")))
    if step.merged or step.late or step.dropped:
        told = f"{step.merged} merged, {step.late + step.dropped} left out"
        parts.append(((told, "warn"),))
    return dropped_to_fit(parts, width)


PANEL = Panel("lanes", "Lanes", body, heading, about="what every stream did during one step")
