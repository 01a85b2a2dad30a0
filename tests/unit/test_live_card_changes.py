"""Settings that change while several cards train: within each card's memory, reversible."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fluxtrain.errors import BadInput, DoesNotFit
from fluxtrain.live.cards.changed import COUNTS, changed_on_cards
from fluxtrain.live.settings import Change, LiveContext, LiveSettings, Use, settings_after
from fluxtrain.plan.cards.capacity import CardCapacity, CardsCapacity
from fluxtrain.plan.cards.choose import place_on_cards
from fluxtrain.plan.cards.request import ParallelRequest
from fluxtrain.plan.choices.placement import Placement
from fluxtrain.plan.request import RunRequest
from fluxtrain.units import GIB
from tests.unit.test_plan_cards_choose import MODEL

TWO = ParallelRequest(cards=2)


def placed(*sizes_gib: float, **asked: object) -> Placement:
    cards = tuple(CardCapacity(index=at, free_bytes=int(n * GIB)) for at, n in enumerate(sizes_gib))
    capacity = CardsCapacity(cards=cards, host_available_bytes=None)
    request = RunRequest(batch_rows=8, chunk_rows=2, offload="weights", **asked)  # type: ignore[arg-type]
    return place_on_cards(MODEL, capacity, None, request, ParallelRequest(cards=len(sizes_gib)))


def counts(placement: Placement, name: str) -> list[int]:
    rows = [[row for row in placement.groups if row.card == number]
            for number in range(len(placement.cards))]  # fmt: skip
    tell = {
        "resident_blocks": lambda row: row.resident and row.kind == "block",
        "device_groups": lambda row: row.weights == "device",
        "blocks_without_recompute": lambda row: row.activations == "kept",
    }[name]
    return [sum(map(tell, one)) for one in rows]


def changed(placement: Placement, name: str, value: int) -> Placement:
    return changed_on_cards(MODEL, placement, name, value, has_gpu=True)


START = placed(8, 8, device_groups=0, resident_blocks=0)


def test_more_is_spread_by_the_memory_that_is_left() -> None:
    even = changed(START, "resident_blocks", 4)
    assert counts(even, "resident_blocks") == [0, 4], "card 0 holds embedding and head too"
    uneven = changed(placed(16, 8, device_groups=0, resident_blocks=0), "resident_blocks", 3)
    assert counts(uneven, "resident_blocks") == [3, 0]
    growth = [b.device_bytes - a.device_bytes
              for a, b in zip(START.cards, even.cards, strict=True)]  # fmt: skip
    assert sum(growth) == even.need.device_bytes - START.need.device_bytes > 0


@given(name=st.sampled_from(COUNTS), value=st.integers(0, 40))
def test_what_is_changed_is_counted_and_within_every_card(name: str, value: int) -> None:
    try:
        after = changed(START, name, value)
    except (BadInput, DoesNotFit):
        return
    assert sum(counts(after, name)) == value == getattr(after.layout, name)
    for need in after.cards:
        assert need.budget_bytes is None or need.device_bytes <= need.budget_bytes
    assert [(row.name, row.card) for row in after.groups] == [
        (row.name, row.card) for row in START.groups
    ]
    back = changed(after, name, 0)
    assert back.groups == START.groups
    assert [card.device_bytes for card in back.cards] == [c.device_bytes for c in START.cards]


def test_what_has_no_room_is_refused_with_the_card_and_the_numbers() -> None:
    with pytest.raises(
        DoesNotFit, match=r"more of card [01], and of its .* GiB the predicted peak"
    ):
        changed(placed(3, 3, device_groups=0, resident_blocks=0), "device_groups", 10)
    with pytest.raises(BadInput, match="resident_blocks=99: .* blocks are on the host"):
        changed(START, "resident_blocks", 99)
    with pytest.raises(BadInput, match="all weights stay on the cards"):
        changed(replace(START, layout=replace(START.layout, offload="none")), "device_groups", 1)


def test_blocks_are_copied_ahead_on_every_card() -> None:
    deeper = changed(START, "prefetch", 3)
    assert [card.slots for card in deeper.cards] == [4, 4]
    assert all(b.device_bytes > a.device_bytes
               for a, b in zip(START.cards, deeper.cards, strict=True))  # fmt: skip
    with pytest.raises(BadInput, match="blocks stream through a card at most, use 1 to"):
        changed(START, "prefetch", 99)


def assert_in_force(context: LiveContext, settings: LiveSettings) -> None:
    """Each count is what was asked for, or all that there can be."""
    rows = [row for row in context.placement_with(settings).groups if row.kind == "block"]
    host = sum(row.weights != "device" for row in rows)
    resident = sum(row.resident for row in rows)
    kept = sum(row.activations == "kept" for row in rows)
    assert resident == min(settings.resident_blocks, host)
    assert kept == min(settings.blocks_without_recompute, len(rows) - host + resident)


@pytest.mark.parametrize("seed", range(40))
def test_any_changes_leave_as_much_as_was_asked_for_and_each_can_be_undone(seed: int) -> None:
    dice = random.Random(seed)
    sizes = [dice.choice([16, 24, 40]) for _ in range(dice.choice([2, 3]))]
    asked = {"device_groups": dice.choice([0, 3]), "resident_blocks": dice.randint(0, 8)}
    start = placed(*sizes, blocks_without_recompute=dice.randint(0, 4), **asked)
    context = LiveContext(facts=MODEL, placement=start, has_gpu=True)
    now, made = context.planned, list[Change]()
    for _ in range(16):
        change = Change(name=dice.choice([*COUNTS, "prefetch"]), value=dice.randint(0, 8))  # type: ignore[arg-type]
        if back := bool(made) and dice.random() < 0.4:
            change = made.pop()
        before = Change(name=change.name, value=getattr(now, change.name))
        try:
            now = settings_after(context, now, change, Use(), back=back)
        except BadInput:
            assert not back, change
            continue
        made += [] if back else [before]
        assert_in_force(context, now)
    while made:
        now = settings_after(context, now, made.pop(), Use(), back=True)
        assert_in_force(context, now)
    assert context.placement_with(now).groups == start.groups


def test_fewer_resident_blocks_leave_those_without_recompute_on_other_cards() -> None:
    start = placed(40, 16, device_groups=0, resident_blocks=6, blocks_without_recompute=1)
    context = LiveContext(facts=MODEL, placement=start, has_gpu=True)
    for resident in range(6):
        settings = replace(context.planned, resident_blocks=resident)
        after = context.placement_with(settings)
        wanted = min(context.planned.blocks_without_recompute, resident)
        assert sum(counts(after, "blocks_without_recompute")) == wanted
        assert after.layout.blocks_without_recompute == wanted


def test_settings_that_are_as_planned_are_the_plan() -> None:
    context = LiveContext(facts=MODEL, placement=START, has_gpu=True)
    assert context.placement_with(context.planned).groups == START.groups
