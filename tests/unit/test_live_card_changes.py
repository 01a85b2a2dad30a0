"""Settings that change while several cards train: within each card's memory, reversible."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fluxtrain.errors import BadInput, DoesNotFit
from fluxtrain.plan.capacity import CardCapacity, CardsCapacity
from fluxtrain.plan.choose import place
from fluxtrain.plan.placement import Placement
from fluxtrain.plan.request import ParallelRequest, RunRequest
from fluxtrain.train.live.edit import MemoryInUse, changed, settings_after
from fluxtrain.train.live.live_run import LiveRun
from fluxtrain.train.live.settings import Change, SettingName, count_of
from fluxtrain.units import GIB
from tests.unit.test_plan_cards_choose import MODEL

COUNTS: tuple[SettingName, ...] = (
    "resident_blocks", "device_groups", "blocks_without_recompute",
)  # fmt: skip


def placed(*sizes_gib: float, **asked: object) -> LiveRun:
    cards = tuple(CardCapacity(index=at, free_bytes=int(n * GIB)) for at, n in enumerate(sizes_gib))
    capacity = CardsCapacity(cards=cards, host_available_bytes=None)
    request = RunRequest(batch_rows=8, chunk_rows=2, offload="weights", **asked)  # type: ignore[arg-type]
    how = ParallelRequest(cards=len(sizes_gib))
    return LiveRun(MODEL, place(MODEL, capacity, request, how), has_gpu=True)


def counts(placement: Placement, name: SettingName) -> list[int]:
    cards = range(len(placement.cards))
    return [count_of([row for row in placement.groups if row.card == at], name) for at in cards]


def with_change(run: LiveRun, name: SettingName, value: int) -> Placement:
    """The placement after a change for which there is room."""
    change = Change(name=name, value=value)
    return run.placement_with(settings_after(run, run.planned, change, MemoryInUse()))


START = placed(8, 8, device_groups=0, resident_blocks=0)


def test_more_is_spread_by_the_memory_that_is_left() -> None:
    even = with_change(START, "resident_blocks", 4)
    assert counts(even, "resident_blocks") == [0, 4], "card 0 holds embedding and head too"
    uneven = with_change(placed(16, 8, device_groups=0, resident_blocks=0), "resident_blocks", 3)
    assert counts(uneven, "resident_blocks") == [3, 0]
    growth = [b.device_bytes - a.device_bytes
              for a, b in zip(START.placement.cards, even.cards, strict=True)]  # fmt: skip
    assert sum(growth) == even.need.device_bytes - START.placement.need.device_bytes > 0


@given(name=st.sampled_from(COUNTS), value=st.integers(0, 40))
def test_what_is_changed_is_counted_and_within_every_card(name: SettingName, value: int) -> None:
    try:
        after = with_change(START, name, value)
    except (BadInput, DoesNotFit):
        return
    assert sum(counts(after, name)) == value == getattr(after.layout, name)
    for need in after.cards:
        assert need.budget_bytes is None or need.device_bytes <= need.budget_bytes
    assert [(row.name, row.card) for row in after.groups] == [
        (row.name, row.card) for row in START.placement.groups
    ]
    now = changed(START, START.planned, Change(name=name, value=value))
    assert changed(START, now, Change(name=name, value=0)).rows == START.planned.rows


def test_what_has_no_room_is_refused_with_the_card_and_the_numbers() -> None:
    small = placed(3, 3, device_groups=0, resident_blocks=0)
    with pytest.raises(DoesNotFit, match=r"more of card [01], and of its budget .* predicted peak"):
        with_change(small, "device_groups", 10)
    peaks = tuple(card.device_bytes for card in START.placement.cards)
    measured = MemoryInUse(device_peak_bytes=(peaks[0], 8 * GIB - 1))
    with pytest.raises(DoesNotFit, match="more of card 1, .* measured peak"):
        settings_after(START, START.planned, Change(name="resident_blocks", value=4), measured)
    with pytest.raises(BadInput, match="resident_blocks=99: .* blocks are on the host"):
        with_change(START, "resident_blocks", 99)
    layout = replace(START.placement.layout, offload="none")
    fixed = replace(START, placement=replace(START.placement, layout=layout))
    with pytest.raises(BadInput, match="all weights stay on the device"):
        with_change(fixed, "device_groups", 1)


def test_what_other_settings_count_on_a_card_stays_as_far_as_it_can() -> None:
    run = placed(40, 40, device_groups=0, resident_blocks=8, blocks_without_recompute=6)
    fewer = changed(run, run.planned, Change(name="resident_blocks", value=3))
    for card in range(2):
        before, after = run.planned.on_card(card), fewer.on_card(card)
        kept, resident = (
            count_of(before, "blocks_without_recompute"), count_of(after, "resident_blocks")
        )  # fmt: skip
        assert count_of(after, "blocks_without_recompute") == min(kept, resident)
        assert all(row.resident for row in after if row.activations == "kept")
