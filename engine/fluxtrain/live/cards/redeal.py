"""Would the blocks be dealt better by what the cards were measured to do in a run? Pure arithmetic.

The simulation of the pipeline is given what each card was measured to take for a block and to copy
a second. It then says what a step takes as the blocks are dealt, and as they could be.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from fluxtrain.errors import DoesNotFit
from fluxtrain.plan.cards.capacity import CardsCapacity
from fluxtrain.plan.cards.choose import option_of
from fluxtrain.plan.cards.dealing import DealtCard, counts_of
from fluxtrain.plan.cards.option import Option
from fluxtrain.plan.cards.rates import CardsRates, times_as_long
from fluxtrain.plan.cards.work import StepWork, step_work
from fluxtrain.plan.cost.rates import Rates
from fluxtrain.plan.facts import ModelFacts
from fluxtrain.plan.heads import HeadDealing
from fluxtrain.plan.request import RunRequest

_NEAR = (1, 2)  # blocks to and from the dealing by measured seconds that are tried too


@dataclass(frozen=True, kw_only=True)
class MeasuredCard:
    """What one card did in steady steps; None for what was not seen."""

    block_s: float | None = None  # seconds a step for one of its blocks, forward and backward
    copying_s: float = 0.0  # seconds a step in which it copied weights up
    up_bytes_per_s: float | None = None  # while it copied
    down_bytes_per_s: float | None = None


@dataclass(frozen=True, kw_only=True)
class DealtRun:
    """A run on several cards as it is."""

    facts: ModelFacts
    capacities: CardsCapacity  # of the cards that compute, in their order
    rates: CardsRates  # of these cards, as the plan had them
    request: RunRequest  # with the rows of a batch and of a chunk
    counts: tuple[int, ...]  # blocks of each card
    share: float = 1.0
    head_dealing: HeadDealing = "one_card"


@dataclass(frozen=True, kw_only=True)
class Redealt:
    """Another dealing, and the simulated seconds of a step with it and as it is."""

    counts: tuple[int, ...]
    step_s: float
    now_s: float

    @property
    def gain(self) -> float:
        """Share of the step's time."""
        return 1.0 - self.step_s / self.now_s


def redealt(run: DealtRun, measured: Sequence[MeasuredCard]) -> Redealt | None:
    """Return the best of the dealings that are tried, by the measured figures; None where the
    present one cannot be simulated.

    Raises nothing for dealings that do not fit: they are left out.
    """
    planned = _option(run, run.counts, run.rates)
    if planned is None or planned.time is None:
        return None
    rates = measured_rates(run, _work(run, planned), measured)
    now = _option(run, run.counts, rates)
    if now is None or now.time is None:
        return None
    best = Redealt(counts=run.counts, step_s=now.step_s, now_s=now.step_s)
    for counts in _candidates(run, measured):
        other = _option(run, counts, rates)
        if other is not None and other.step_s < best.step_s:
            best = Redealt(counts=counts, step_s=other.step_s, now_s=now.step_s)
    return best


def measured_rates(run: DealtRun, work: StepWork, measured: Sequence[MeasuredCard]) -> CardsRates:
    """Return the plan's rates with what was measured of each card in their place."""
    pairs = zip(run.rates.cards, measured, strict=True)
    found = [
        _as_measured(rates, one, _block_s(work, card)) for card, (rates, one) in enumerate(pairs)
    ]
    # what was measured while all cards copied is what each has beside the others
    up_seen = all(one.up_bytes_per_s for one in measured)
    down_seen = all(one.down_bytes_per_s for one in measured)
    return replace(
        run.rates,
        cards=tuple(found),
        up_together_bytes_per_s=None if up_seen else run.rates.up_together_bytes_per_s,
        down_together_bytes_per_s=None if down_seen else run.rates.down_together_bytes_per_s,
    )


def _as_measured(rates: Rates, measured: MeasuredCard, simulated_s: float) -> Rates:
    """Return a card's rates by what was measured; by the plan's a block took `simulated_s`."""
    factor = (measured.block_s or 0.0) / simulated_s if simulated_s > 0 else 0.0
    found = _as_long(rates, factor) if factor > 0 else rates
    up, down = measured.up_bytes_per_s, measured.down_bytes_per_s
    return replace(
        found,
        h2d_bytes_per_s=up or found.h2d_bytes_per_s,
        h2d_both_bytes_per_s=up or found.h2d_both_bytes_per_s,
        d2h_bytes_per_s=down or found.d2h_bytes_per_s,
        d2h_both_bytes_per_s=down or found.d2h_both_bytes_per_s,
    )


def _as_long(rates: Rates, factor: float) -> Rates:
    timed = rates.calibration
    return replace(
        rates,
        matmul_per_s=rates.matmul_per_s / factor,
        calibration=None if timed is None else times_as_long(timed, factor),
    )


def _block_s(work: StepWork, card: int) -> float:
    """Return the simulated seconds a step for one of a card's blocks."""
    mine = [g for g in work.groups if g.kind == "block" and g.card == card]
    whole_s = sum(sum(group.forward_s) + sum(group.backward_s) for group in mine)
    return work.passes * whole_s / max(1, len(mine))


def _work(run: DealtRun, option: Option) -> StepWork:
    request = run.request
    return step_work(
        option.dealt,
        [one.layout for one in option.settled],
        run.rates.of(range(len(run.counts))),
        clips=not request.optimizer_in_backward,
        passes=request.passes,
        head_dealing=run.head_dealing,
    )


def _option(run: DealtRun, counts: tuple[int, ...], rates: CardsRates) -> Option | None:
    try:
        return option_of(
            run.facts, run.capacities, rates, run.request, counts,
            share=run.share, head_dealing=run.head_dealing,
        )  # fmt: skip
    except DoesNotFit:
        return None


def _candidates(run: DealtRun, measured: Sequence[MeasuredCard]) -> Iterator[tuple[int, ...]]:
    """Yield dealings by what a block takes each card, computed or copied, whichever is longer, and
    some near it."""
    loads = [
        max(one.block_s or 0.0, one.copying_s / max(1, count))
        for one, count in zip(measured, run.counts, strict=True)
    ]
    if min(loads) <= 0:
        return
    by_speed = counts_of(sum(run.counts), [DealtCard(block_s=load) for load in loads], "speed")
    found: dict[tuple[int, ...], None] = {by_speed: None}
    slow, fast = loads.index(max(loads)), loads.index(min(loads))
    for near in _NEAR:
        for shift in (near, -near):
            counts = list(by_speed)
            counts[slow] += shift
            counts[fast] -= shift
            if min(counts) >= 1:
                found.setdefault(tuple(counts), None)
    found.pop(run.counts, None)
    yield from found
