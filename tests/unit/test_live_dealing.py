"""Advice on a dealing: from measured figures alone, with the simulator's seconds."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from fluxtrain.config.schema import demo_config
from fluxtrain.live.advice import LEAST_GAIN, Advice
from fluxtrain.live.cards.dealing import (
    LEAST_STEPS,
    MOST_LOOKS,
    Dealing,
    DealingAdviser,
    advice_of,
    measured_cards,
)
from fluxtrain.live.cards.redeal import DealtRun, MeasuredCard, Redealt, redealt
from fluxtrain.live.settings import LiveContext
from fluxtrain.live.setup import _dealing
from fluxtrain.plan.cards.choose import place_on_cards
from fluxtrain.plan.cards.request import ParallelRequest
from fluxtrain.plan.request import RunRequest
from fluxtrain.telemetry import events as ev
from fluxtrain.trace.lanes import Interval, StepLanes
from tests.unit.live_ground import ground
from tests.unit.test_plan_cards_choose import machine, model, rates
from tests.unit.test_train_live import Run

BLOCKS = 12
FACTS = model(BLOCKS)
TWO = rates(150e12, 150e12)
MACHINE = machine(4, 4)
REQUEST = RunRequest(batch_rows=16, chunk_rows=4)
EVEN = ParallelRequest(cards=2, dealing=(6, 6))


def dealing(steps: list[StepLanes] | None = None, **changes: Any) -> Dealing:
    placement = place_on_cards(FACTS, MACHINE, TWO, REQUEST, EVEN)
    run = DealtRun(
        facts=FACTS, capacities=MACHINE, rates=TWO, request=REQUEST,
        counts=tuple(card.blocks for card in placement.cards),
    )  # fmt: skip
    made = Dealing(run=run, placement=placement, lanes=lambda: steps or [])
    return replace(made, **changes)


def planned_block_s() -> float:
    """What the plan's rates make of a block: measured alike, nothing is to be dealt anew."""
    from fluxtrain.live.cards.redeal import _block_s, _option, _work

    run = dealing().run
    option = _option(run, run.counts, run.rates)
    assert option is not None
    return _block_s(_work(run, option), 0)


BLOCK_S = planned_block_s()


@pytest.fixture(scope="module")
def slower() -> Redealt:
    """Card 1 takes two and a half times as long for a block."""
    found = redealt(dealing().run, (card(), card(2.5)))
    assert found is not None
    return found


@pytest.fixture
def known(monkeypatch: pytest.MonkeyPatch, slower: Redealt) -> Redealt:
    """The same where advice is made, which then need not simulate it anew."""
    monkeypatch.setattr("fluxtrain.live.cards.dealing.redealt", lambda *_: slower)
    return slower


def card(times: float = 1.0, **facts: Any) -> MeasuredCard:
    return MeasuredCard(block_s=times * BLOCK_S, **facts)


def test_cards_that_do_what_was_planned_are_dealt_as_they_are() -> None:
    found = redealt(dealing().run, (card(), card()))
    assert found is not None and found.counts == (6, 6) and found.gain == 0.0
    assert advice_of(dealing(), (card(), card()), found.now_s) is None


def test_a_card_that_computes_longer_gets_fewer_blocks_by_the_simulators_gain(
    known: Redealt,
) -> None:
    measured, found = (card(), card(2.5)), known
    assert found.counts[0] > 6 > found.counts[1]
    assert sum(found.counts) == BLOCKS and found.step_s < found.now_s
    slow = rates(150e12, 60e12)  # the same machine, had a probe found it
    again = place_on_cards(FACTS, MACHINE, slow, REQUEST, replace(EVEN, dealing=found.counts))
    assert again.step_s == pytest.approx(found.step_s, rel=0.05)
    advice = advice_of(dealing(), measured, found.now_s)
    assert advice is not None and advice.gain == found.gain >= LEAST_GAIN
    assert advice.setting == f"parallel.dealing=[{found.counts[0]},{found.counts[1]}]"
    assert f"deal it {found.counts[1]} of 12 blocks, not 6" in advice.because
    assert "card 1 computes a block in" in advice.because and advice.change is None


def test_a_card_in_a_narrow_slot_is_told_with_its_lanes_and_rates() -> None:
    block = FACTS.groups[1]
    slow = {"up_bytes_per_s": 5e8, "down_bytes_per_s": 5e8}
    fast = {"up_bytes_per_s": 5e10, "down_bytes_per_s": 5e10}
    measured = (card(**fast), card(copying_s=12 * block.weight_bytes / 5e8, **slow))
    some = dealing(widths=(16, 4))
    found = redealt(some.run, measured)
    assert found is not None and found.counts[1] < 6
    advice = advice_of(some, measured, found.now_s)
    assert advice is not None
    assert advice.because.startswith(
        "card 1 sits in an x4 slot, and copies weights at 500 MB/s, card 0 at 50.0 GB/s: deal it"
    )
    unknown = advice_of(dealing(), measured, found.now_s)
    assert unknown is not None and "slot" not in unknown.because


def test_a_simulation_that_is_far_from_the_measured_step_says_nothing(known: Redealt) -> None:
    measured = (card(), card(2.5))
    assert advice_of(dealing(), measured, 3 * known.now_s) is None
    assert advice_of(dealing(), measured, known.now_s / 3) is None


def test_cards_in_another_order_than_torchs_are_named_in_the_setting(known: Redealt) -> None:
    some = dealing()
    cards = some.placement.cards
    turned = replace(some.placement, cards=(replace(cards[0], index=1), replace(cards[1], index=0)))
    advice = advice_of(replace(some, placement=turned), (card(), card(2.5)), known.now_s)
    assert advice is not None and advice.setting.startswith("parallel.cards=[1,0] parallel.deal")


# --- what was measured ----------------------------------------------------------------------------


def step(number: int, slow: float = 2.0, up_s: float = 0.001) -> StepLanes:
    """Blocks in turn on two cards; those of card 1 take `slow` times as long."""
    found, at = [], 0.0
    for block in range(BLOCKS):
        own, seconds = block % 2, 0.01 * (slow if block % 2 else 1.0)
        name = f"layers.{block}"
        found += [
            Interval("gpu", "forward", name, at, seconds, card=own),
            Interval("stall", "cards", "", at, 0.002, card=own),
            Interval("h2d", "weights", name, at, up_s, card=own),
            Interval("d2h", "gradients", name, at, 2 * up_s, card=own),
        ]
        at += seconds
    return StepLanes(step=number, wall_s=0.0, length_s=at, intervals=found)


def test_figures_are_those_of_the_lanes() -> None:
    some = dealing([step(at) for at in range(LEAST_STEPS)])
    rows = [
        replace(row, weights="host", resident=False) if row.kind == "block" else row
        for row in some.placement.groups
    ]
    some = replace(some, placement=replace(some.placement, groups=tuple(rows)))
    found = measured_cards(some)
    assert found is not None
    assert found[0].block_s == pytest.approx(0.008) and found[1].block_s == pytest.approx(0.018)
    block = FACTS.groups[1]
    assert found[1].up_bytes_per_s == pytest.approx(block.weight_bytes / 0.001)
    assert found[1].down_bytes_per_s == pytest.approx(block.rounded_bytes / 0.002)
    assert found[0].copying_s == pytest.approx(0.006)


def test_nothing_is_measured_of_few_steps_or_of_cards_that_are_never_idle() -> None:
    assert measured_cards(dealing([step(1)] * (LEAST_STEPS - 1))) is None
    busy = [Interval("gpu", "forward", f"layers.{at}", 0.0, 1.0, card=at) for at in (0, 1)]
    always = StepLanes(step=1, wall_s=0.0, length_s=1.0, intervals=busy)
    assert measured_cards(dealing([always] * LEAST_STEPS)) is None


def test_the_adviser_looks_beside_the_training_and_only_at_new_figures(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    said = Advice(id="dealing", because="card 1 is slow", gain=0.1, setting="parallel.dealing")
    monkeypatch.setattr("fluxtrain.live.cards.dealing.advice_of", lambda *_: said)
    told: list[Advice | None] = []
    steps = [step(at) for at in range(LEAST_STEPS)]
    adviser = DealingAdviser(dealing(steps), told.append)
    for _ in range(3):
        adviser.look(1.0)
        adviser.wait()
    assert told == [said]
    for at in range(2 * MOST_LOOKS):
        steps[:] = [step(number, slow=2.0 + at) for number in range(LEAST_STEPS)]
        adviser.look(1.0)
        adviser.wait()
    assert len(told) == MOST_LOOKS


def test_a_run_on_several_cards_is_told_it_and_told_when_it_holds_no_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    said = Advice(id="dealing", because="card 1 is slow", gain=0.12, setting="parallel.dealing")
    answers: list[Advice | None] = [said, None]
    monkeypatch.setattr("fluxtrain.live.cards.dealing.advice_of", lambda *_: answers.pop(0))
    steps = [step(at) for at in range(LEAST_STEPS)]
    some = dealing(steps)
    run = Run(context=replace(ground(), placement=some.placement), dealing=some)
    adviser = run.live._dealing
    assert adviser is not None
    run.steps(30)
    adviser.wait()
    (given,) = run.told(ev.AdviceGiven)
    assert (given.id, given.how, given.apply) == ("dealing", "parallel.dealing", {})
    assert given.gain_share == 0.12
    ok, answer = run.ask(advice="dealing")
    assert not ok and "for the next run" in answer
    steps[:] = [step(at, slow=5.0) for at in range(LEAST_STEPS)]
    run.steps(25)
    adviser.wait()
    assert [one.id for one in run.told(ev.AdviceWithdrawn)] == ["dealing"]


def test_what_advice_follows_from_is_the_runs_own_placement(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[Any] = []

    def rates_of(capacities: Any, first: Any, timed_on: int) -> Any:
        seen.append([card.index for card in capacities.cards])
        assert timed_on == 0
        return rates(1e14, 2e14)

    monkeypatch.setattr("fluxtrain.live.setup.rates_of_cards", rates_of)
    placement = dealing().placement
    cards = placement.cards
    turned = replace(placement, cards=(replace(cards[0], index=1), replace(cards[1], index=0)))
    context = LiveContext(facts=FACTS, placement=turned, has_gpu=True)
    config = demo_config(["train.batch_rows=16", "placement.aggressiveness=balanced"])
    found = _dealing(config, context, TWO.cards[0], list)
    assert found is not None and seen == [[0, 1]]
    run = found.run
    assert (run.counts, run.share) == ((6, 6), 0.5)
    assert [card.index for card in run.capacities.cards] == [1, 0]
    assert [card.matmul_per_s for card in run.rates.cards] == [2e14, 1e14]
    assert (run.request.batch_rows, run.request.chunk_rows) == (16, 4)
    alone = LiveContext(facts=FACTS, placement=replace(placement, cards=()), has_gpu=True)
    assert _dealing(config, alone, TWO.cards[0], list) is None
