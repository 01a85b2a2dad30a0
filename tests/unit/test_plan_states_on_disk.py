"""Optimizer states on disk: asked for, the fewest with which the host suffices, timed and told."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fluxtrain.config.errors import ALIASES
from fluxtrain.config.schema import validate
from fluxtrain.errors import BadInput, DoesNotFit
from fluxtrain.plan.capacity import CardCapacity, CardsCapacity, DiskHome
from fluxtrain.plan.choose import place
from fluxtrain.plan.facts import Capacity, GroupFacts, ModelFacts, RowFacts
from fluxtrain.plan.footprint import footprint, spill_bytes, spilled
from fluxtrain.plan.group_placement import check_rows, disk_counts, table_of
from fluxtrain.plan.guard import UNKNOWN_DISK, DiskNeed, refuse_disk, refuse_spill
from fluxtrain.plan.placement import Placement
from fluxtrain.plan.rates import CardsRates, Rates
from fluxtrain.plan.request import ParallelRequest, RunRequest
from fluxtrain.plan.search import HOST_SHARE, Search
from fluxtrain.plan.simulation import step_time
from fluxtrain.units import GIB, MIB, count_text

BLOCK, EDGE = 233_000_000, 545_000_000  # parameters of a 7.6B model
SPILL = DiskHome(
    folder="/runs/one", read_bytes_per_s=2e9, write_bytes_per_s=1e9, total_bytes=10**12
)
RATES = Rates(
    has_gpu=True, matmul_per_s=3e14, adamw_per_s=3e9, h2d_bytes_per_s=25e9, d2h_bytes_per_s=25e9,
    disk_bytes_per_s=2e9, disk_write_bytes_per_s=1e9,
)  # fmt: skip


def model(layers: int = 28) -> ModelFacts:
    block = GroupFacts(name="", kind="block", weight_bytes=2 * BLOCK, trained_bf16=BLOCK)
    edge = GroupFacts(name="", kind="edge", weight_bytes=2 * EDGE, trained_bf16=EDGE)
    row = RowFacts(
        hidden=3584, vocabulary=152_064, sequence_length=512, dtype_bytes=2,
        activation_bytes=200 * MIB,
    )  # fmt: skip
    blocks = (replace(block, name=f"layers.{at}") for at in range(layers))
    return ModelFacts(
        groups=(replace(edge, name="embed"), *blocks, replace(edge, name="head")), row=row
    )


def planned(
    available_gib: float, spill: DiskHome | None = SPILL, rates: Rates | None = RATES, **asked: Any
) -> Placement:
    capacity = Capacity(device_free_bytes=16 * GIB, host_available_bytes=int(available_gib * GIB))
    request = RunRequest(batch_rows=8, **{"disk": "on", **asked})
    return place(model(), capacity, request, rates=rates, spill=spill)


def away(plan: Placement) -> list[str]:
    return [row.name for row in plan.groups if row.state == "disk"]


def test_nothing_is_on_disk_where_the_host_holds_all() -> None:
    plan = planned(200)
    assert not away(plan) and plan == planned(200, spill=None) and not plan.spill_folder


@settings(deadline=None, max_examples=6)
@given(st.floats(50.0, 120.0), st.booleans())
def test_the_fewest_groups_with_which_the_host_suffices(host_gib: float, timed: bool) -> None:
    plan = planned(host_gib, rates=RATES if timed else None)
    limit = int(host_gib * GIB * HOST_SHARE)
    count = len(away(plan))
    assert count == plan.layout.disk_states and plan.need.host_bytes <= limit
    check_rows(plan.groups)
    if count:
        assert plan.spill_folder == SPILL.folder
        fewer = replace(plan.layout, disk_states=count - 1)
        assert footprint(model(), fewer, has_gpu=True).host_bytes > limit
    for row in plan.groups:
        assert row.weights != "disk" and row.gradients != "disk"
        assert row.state != "disk" or row.weights == row.gradients == "host"


@pytest.mark.parametrize("millions", [0.5, 5, 50])
def test_a_host_that_is_too_small_even_so_is_told_the_least_that_suffices(millions: float) -> None:
    """Buffers for weights from disk take more than small blocks leave."""
    count = int(1e6 * millions)
    groups = [
        replace(g, weight_bytes=2 * count, trained_bf16=count) for g in model(layers=6).groups
    ]
    request = RunRequest(offload="max", batch_rows=1, chunk_rows=1, disk="on")
    room = Capacity(device_free_bytes=16 * GIB, host_available_bytes=1)
    search = Search(replace(model(), groups=tuple(groups)), room, request, spill=SPILL)
    least = search.need(search.nearest()).host_bytes

    def fits(host_bytes: int) -> bool:
        here = replace(room, host_available_bytes=host_bytes)
        return replace(search, capacity=here).find() is not None

    assert fits(least) and not fits(least - 1)


def test_the_bytes_are_those_of_memory_less_the_states_and_with_four_buffers() -> None:
    layout = planned(80).layout
    facts, held = model(), replace(layout, disk_states=0)
    size = sum(group.state_bytes for group in spilled(facts, layout))
    here, there = (footprint(facts, one, has_gpu=True) for one in (held, layout))
    assert here.host_bytes - there.host_bytes == size - 4 * 128 * MIB
    assert here.device_bytes == there.device_bytes
    names = [row.name for row in table_of(facts, layout) if row.state == "disk"]
    assert len(names) == layout.disk_states
    assert max(int(name.split(".")[1]) for name in names) > 14  # here and there


@pytest.mark.parametrize("host_gib", [30.0, 22.0, 14.0])
@pytest.mark.parametrize("clips", [True, False])
def test_gradients_then_weights_of_the_fewest_blocks_follow(host_gib: float, clips: bool) -> None:
    plan = planned(host_gib, optimizer_in_backward=not clips)
    layout, limit = plan.layout, int(host_gib * GIB * HOST_SHARE)
    gradients, weights = layout.disk_gradients, layout.disk_weights
    assert plan.need.host_bytes <= limit
    assert weights or gradients or host_gib > 22 or not clips
    assert not gradients if not clips else gradients == 28 or not weights
    name, count = ("disk_weights", weights) if weights else ("disk_gradients", gradients)
    if count:
        fewer = replace(layout, **{name: count - 1})  # type: ignore[arg-type]
        assert footprint(model(), fewer, has_gpu=True).host_bytes > limit
    check_rows(plan.groups)
    rows = [row for row in plan.groups if row.kind == "block"]
    assert sum(row.weights == "disk" for row in rows) == weights
    assert sum(row.gradients == "disk" for row in rows) == gradients
    assert all(row.state == "disk" for row in rows if "disk" in (row.weights, row.gradients))
    assert disk_counts(model().groups, plan.groups) == {
        "disk_groups": 0, "disk_weights": weights,
        "disk_states": layout.disk_states, "disk_gradients": gradients,
    }  # fmt: skip
    there = sum(group.state_bytes for group in spilled(model(), layout))
    there += 2 * BLOCK * (gradients + weights)
    assert spill_bytes(model(), layout) == there
    time = step_time(model(), layout, RATES, clips=clips)
    assert time.parts_s["disk_states"] == pytest.approx(there / 2e9 + there / 1e9)
    assert time.parts_s["disk_read"] == pytest.approx(2 * 2 * BLOCK * weights / 2e9)
    (choice,) = [one for one in plan.choices if one.name == "states on disk"]
    for kind, number in (("gradients", gradients), ("weights", weights)):
        assert (f"the {kind} of {number} blocks" in choice.because) == (number > 0)


def test_gradients_of_several_passes_stay_and_weights_follow() -> None:
    plan = planned(54, passes=2)
    assert plan.layout.disk_weights and not plan.layout.disk_gradients
    with pytest.raises(DoesNotFit) as refused:
        planned(14, disk="auto")
    for words in ("states of 30 groups on disk, with the gradients of 28 blocks and the weights of",
                  "read for forward and backward", "written a day"):  # fmt: skip
        assert words in str(refused.value)


@pytest.mark.parametrize("clips", [True, False])
def test_a_step_takes_what_the_disk_needs_for_reads_and_writes(clips: bool) -> None:
    facts, layout = model(), planned(60, optimizer_in_backward=not clips).layout
    size = sum(group.state_bytes for group in spilled(facts, layout))
    assert size
    disk_s = size / 2e9 + size / 1e9
    time = step_time(facts, layout, RATES, clips=clips)
    memory = step_time(facts, replace(layout, disk_states=0), RATES, clips=clips)
    assert time.parts_s["disk_states"] == pytest.approx(disk_s)
    assert time.step_s >= max(disk_s, memory.step_s)
    assert time.step_s <= disk_s + memory.step_s
    assert time.busiest == "disk" and time.binds == "optimizer states on disk"
    faster = step_time(facts, layout, replace(RATES, disk_bytes_per_s=None), clips=clips)
    assert faster.step_s < time.step_s


def test_moments_on_disk_are_never_deferred() -> None:
    plan = planned(60, deferred_moments=True)
    assert away(plan) and plan.time is not None
    for row, work in zip(plan.groups, plan.time.work.groups, strict=True):
        assert not (row.state == "disk" and work.moments_s)


def test_the_reason_has_seconds_bytes_and_the_drive_s_rating() -> None:
    plan = planned(80)
    (choice,) = [one for one in plan.choices if one.name == "states on disk"]
    size = sum(group.state_bytes for group in spilled(model(), plan.layout))
    assert choice.value == f"{len(away(plan))} of 30 groups"
    assert f"{count_text(600 * 10**12 // size)} steps" in choice.because
    for words in ("/runs/one", "2.00 GB/s and 1.00 GB/s", "written a day", "assumed"):
        assert words in choice.because


def test_it_is_never_chosen_but_named_with_its_cost() -> None:
    with pytest.raises(DoesNotFit) as refused:
        planned(80, disk="auto")
    for words in ("placement.disk=on fits", "steps write as much as", "written a day"):
        assert words in str(refused.value)
    with pytest.raises(DoesNotFit) as refused:
        planned(80, disk="off")
    assert "disk" not in str(refused.value)
    with pytest.raises(DoesNotFit, match="which is in memory"):
        planned(
            80, replace(SPILL, unusable="optimizer states cannot live in /x, which is in memory")
        )
    with pytest.raises(DoesNotFit) as refused:
        planned(3, disk="auto")
    assert "placement.disk" not in str(refused.value)  # it would not help


def test_the_host_is_held_to_what_the_plan_may_use() -> None:
    assert away(planned(500, host_gib=80)) == away(planned(80))
    assert not away(planned(500))


def test_cards_share_the_host_and_the_disk() -> None:
    cards = tuple(CardCapacity(index=at, free_bytes=16 * GIB) for at in range(2))
    capacity = CardsCapacity(cards=cards, host_available_bytes=80 * GIB)
    rates, request = CardsRates(cards=(RATES, RATES)), RunRequest(batch_rows=8, disk="on")
    both = ParallelRequest(cards=2)
    plan = place(model(), capacity, request, both, rates=rates, spill=SPILL)
    assert len(plan.cards) == 2 and away(plan) and plan.need.host_bytes <= 72 * GIB
    assert plan.layout.disk_states == len(away(plan))
    with pytest.raises(DoesNotFit, match="placement.disk=on fits"):
        place(model(), capacity, replace(request, disk="auto"), both, rates=rates, spill=SPILL)


def test_the_settings_have_the_words_of_yaml_and_of_other_programs() -> None:
    raw: dict[str, Any] = {"model": {"path": "m"}, "data": {"path": "d"}}
    for word, means in ((True, "on"), (False, "off"), ("on", "on"), ("auto", "auto")):
        made = validate({**raw, "placement": {"disk": word, "host_gib": 64, "disk_path": "/x"}})
        assert made.placement.disk == means and made.placement.host_bytes == 64 * GIB
    assert ALIASES["nvme_path"] == "placement.disk_path"
    with pytest.raises(BadInput, match="placement.disk"):
        validate({**raw, "placement": {"disk": "always"}})
    with pytest.raises(BadInput, match="placement.disk_path"):
        validate({**raw, "placement": {"nvme_path": "/x"}})


def test_states_and_checkpoints_on_one_disk_are_counted_together() -> None:
    need = DiskNeed(checkpoint_bytes=10 * GIB, kept=1, spill_bytes=30 * GIB)
    room = replace(UNKNOWN_DISK, path="/runs", free_bytes=40 * GIB)
    refuse_disk(replace(need, spill_bytes=0), room)
    with pytest.raises(DoesNotFit, match="states of 30.0 GiB that live there.*placement.disk_path"):
        refuse_disk(need, room)
    refuse_spill(GIB, "/x", None)
    with pytest.raises(DoesNotFit, match="1.00 GiB of optimizer states are to live in /x"):
        refuse_spill(GIB, "/x", MIB)
