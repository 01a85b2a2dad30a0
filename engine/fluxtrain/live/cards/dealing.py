"""Advice on how blocks are dealt to several cards, from what each card did in the last steps.

The recorder tells the seconds that each card computed its blocks and copied their weights; the
planner's simulation of the pipeline tells what another dealing would take with those figures. It
runs in a thread of its own, some tenths of a second, only while a card is idle beside the others.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

from fluxtrain.live.advice import LEAST_GAIN, Advice
from fluxtrain.live.cards.redeal import DealtRun, MeasuredCard, Redealt, redealt
from fluxtrain.live.run_facts import MODEL_OFF
from fluxtrain.plan.choices.placement import Placement
from fluxtrain.plan.facts import GroupFacts
from fluxtrain.trace.attribution import BINDS_FROM, attribute, computing_s
from fluxtrain.trace.lanes import Interval, StepLanes
from fluxtrain.units import duration_text, rate_text

LEAST_STEPS = 5  # recorded ones, before anything is said
MOST_LOOKS = 5  # at figures that differ, in a run
_MOVED = 0.05  # figures that moved less were looked at already
_UNLIKE = 0.8  # of the fastest card's rate: less is worth a word


@dataclass(frozen=True, kw_only=True)
class Dealing:
    """What advice on a dealing needs to know of a run."""

    run: DealtRun
    placement: Placement
    lanes: Callable[[], Sequence[StepLanes]]  # of the last steps
    widths: tuple[int | None, ...] = ()  # lanes of each card's slot, where they are known


class DealingAdviser:
    """Looks now and then, in a thread of its own; `tell` is told advice, None where none holds."""

    def __init__(self, dealing: Dealing, tell: Callable[[Advice | None], None]) -> None:
        self._dealing, self._tell = dealing, tell
        self._seen: tuple[MeasuredCard, ...] = ()
        self._looks = 0
        self._thread: threading.Thread | None = None

    def look(self, step_s: float) -> None:
        """Judge the last steps, of which the median took `step_s`, unless that is under way."""
        if self._looks >= MOST_LOOKS or (self._thread is not None and self._thread.is_alive()):
            return
        measured = measured_cards(self._dealing)
        if measured is None or not _differ(measured, self._seen):
            return
        self._seen, self._looks = measured, self._looks + 1
        arguments = (measured, step_s)
        self._thread = threading.Thread(
            target=self._judge, args=arguments, name="dealing", daemon=True
        )
        self._thread.start()

    def wait(self) -> None:
        """Wait for a look under way; for tests."""
        if self._thread is not None:
            self._thread.join()

    def _judge(self, measured: Sequence[MeasuredCard], step_s: float) -> None:
        self._tell(advice_of(self._dealing, measured, step_s))


def measured_cards(dealing: Dealing) -> tuple[MeasuredCard, ...] | None:
    """Return the medians of what each card did; None with too few steps, or while no card is idle
    beside the others."""
    steps = [step for step in dealing.lanes() if step.cards == len(dealing.run.counts)]
    if len(steps) < LEAST_STEPS:
        return None
    idle = [
        max(one.for_others_s for one in attribute(step).cards) / step.length_s
        for step in steps
        if step.length_s > 0
    ]
    if not idle or median(idle) < BINDS_FROM:
        return None
    groups = {group.name: group for group in dealing.run.facts.groups if group.kind == "block"}
    streamed = {
        row.name for row in dealing.placement.groups
        if row.kind == "block" and row.weights != "device" and not row.resident
    }  # fmt: skip
    return tuple(
        _measured(steps, card, count, groups, streamed)
        for card, count in enumerate(dealing.run.counts)
    )


def _measured(
    steps: Sequence[StepLanes],
    card: int,
    count: int,
    groups: dict[str, GroupFacts],
    streamed: set[str],
) -> MeasuredCard:
    computed = [computing_s(step, card, ("forward", "backward"), groups) for step in steps]
    up: list[tuple[int, float]] = []
    down: list[tuple[int, float]] = []
    copying: list[float] = []
    for step in steps:
        mine = [one for one in step.intervals if one.card == card]
        ups = [one for one in mine if (one.lane, one.kind) == ("h2d", "weights")]
        copying.append(sum(one.duration_s for one in ups))
        up += [
            (groups[one.name].weight_bytes, one.duration_s)
            for one in ups
            if one.name in streamed and _is_whole(one)
        ]
        down += [
            (groups[one.name].rounded_bytes, one.duration_s)
            for one in mine
            if (one.lane, one.kind) == ("d2h", "gradients")
            and one.name in groups
            and _is_whole(one)
        ]
    block_s = median(computed) / max(1, count)
    return MeasuredCard(
        block_s=block_s or None,
        copying_s=median(copying),
        up_bytes_per_s=_rate(up),
        down_bytes_per_s=_rate(down),
    )


def _is_whole(one: Interval) -> bool:
    """Return whether an interval is one copy, all of it."""
    return one.pieces == 1 and not one.began_before and not one.goes_on and one.duration_s > 0


def _rate(copies: Sequence[tuple[int, float]]) -> float | None:
    """Return the median rate of copies; None where none was seen whole."""
    return median(size / seconds for size, seconds in copies) if copies else None


def _differ(new: Sequence[MeasuredCard], old: Sequence[MeasuredCard]) -> bool:
    if len(new) != len(old):
        return True
    for one, other in zip(new, old, strict=True):
        pairs = ((one.block_s, other.block_s), (one.up_bytes_per_s, other.up_bytes_per_s))
        if any((a or 0.0) > 0 and abs((b or 0.0) / (a or 1.0) - 1) > _MOVED for a, b in pairs):
            return True
    return False


def advice_of(dealing: Dealing, measured: Sequence[MeasuredCard], step_s: float) -> Advice | None:
    """Return the dealing that is simulated to be faster, with the measured cause; None where none
    is, or where the simulation is far from the step that was measured."""
    found = redealt(dealing.run, measured)
    if found is None or not 1 / MODEL_OFF < found.now_s / step_s < MODEL_OFF:
        return None
    if found.gain < LEAST_GAIN:
        return None
    return Advice(
        id="dealing",
        because=_because(dealing, measured, found),
        gain=found.gain,
        setting=_setting(dealing, found.counts),
    )


def _because(dealing: Dealing, measured: Sequence[MeasuredCard], found: Redealt) -> str:
    """Say which card gets fewer blocks, what of it was measured, and the simulated step."""
    changes = [new - old for new, old in zip(found.counts, dealing.run.counts, strict=True)]
    card = changes.index(min(changes))
    fast = changes.index(max(changes))
    cause = _cause(dealing, measured, card, fast)
    counts, blocks = found.counts, sum(found.counts)
    return (
        f"card {card} {cause}: deal it {counts[card]} of {blocks} blocks, not "
        f"{dealing.run.counts[card]}; the pipeline is simulated to take "
        f"{duration_text(found.step_s)} a step with these figures, and "
        f"{duration_text(found.now_s)} as it is"
    )


def _cause(dealing: Dealing, measured: Sequence[MeasuredCard], card: int, fast: int) -> str:
    own, other = measured[card], measured[fast]
    computing_s = (own.block_s or 0.0) * dealing.run.counts[card]
    up, best = own.up_bytes_per_s or 0.0, other.up_bytes_per_s or 0.0
    if own.copying_s > computing_s and 0 < up < _UNLIKE * best:
        widths = dealing.widths
        width = widths[card] if card < len(widths) else None
        narrower = width is not None and width < max((w or 0 for w in widths), default=0)
        slot = f"sits in an x{width} slot, and " if narrower else ""
        return f"{slot}copies weights at {rate_text(up)}, card {fast} at {rate_text(best)}"
    own_s, other_s = own.block_s or 0.0, other.block_s or 0.0
    return (
        f"computes a block in {duration_text(own_s)} a step, card {fast} in "
        f"{duration_text(other_s)}"
    )


def _setting(dealing: Dealing, counts: Sequence[int]) -> str:
    """Return the settings for the next run; cards in another order than torch's are named."""
    indices = [card.index for card in dealing.placement.cards]
    dealt = f"parallel.dealing=[{','.join(map(str, counts))}]"
    if indices == list(range(len(indices))):
        return dealt
    return f"parallel.cards=[{','.join(map(str, indices))}] {dealt}"
