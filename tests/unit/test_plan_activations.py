"""Where boundaries go home, those of the last blocks stay where room is left for them."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from fluxtrain.errors import DoesNotFit
from fluxtrain.plan.choose import place
from fluxtrain.plan.facts import ModelFacts
from fluxtrain.plan.footprint import (
    INPUTS_IN_FLIGHT,
    Layout,
    block_inputs_on_host_bytes,
    footprint,
    left_on_device,
    offloading_blocks,
)
from fluxtrain.plan.request import RunRequest
from fluxtrain.plan.search import Search, TimedSearch
from fluxtrain.plan.simulation import step_time
from fluxtrain.train.live.edit import changed
from fluxtrain.train.live.live_run import LiveRun
from fluxtrain.train.live.out_of_memory import fallback_steps
from fluxtrain.train.live.settings import Change, LiveSettings
from tests.unit.live_ground import BLOCKS, ground
from tests.unit.plan_models import room
from tests.unit.test_plan_properties import models
from tests.unit.test_plan_timed import (
    RATES,
    RATES_KEEPING,
    layout,
    measured,
    model,
    step_s,
)

OFFLOADED = Layout(offload="weights", activations="host", batch_rows=8, chunk_rows=4)
BLOCK_INPUT = 8 * 1024 * 1536 * 2
SLOW_BUS = replace(RATES, h2d_bytes_per_s=3e9, d2h_bytes_per_s=3e9)  # where the copies bind


def test_those_that_stay_move_from_the_host_to_the_device_with_what_follows_the_blocks() -> None:
    facts = model(8)
    before = footprint(facts, OFFLOADED, has_gpu=True)
    for count in range(1, 9):
        some = replace(OFFLOADED, activations_on_device=count)
        found = footprint(facts, some, has_gpu=True)
        assert offloading_blocks(facts, some) == 8 - count
        assert before.host_bytes - found.host_bytes == (count + 1) * BLOCK_INPUT
        on_device = min(9, count + 1 + INPUTS_IN_FLIGHT)
        assert found.block_inputs_bytes == on_device * BLOCK_INPUT
    nowhere = replace(OFFLOADED, activations="device", activations_on_device=3)
    assert footprint(facts, nowhere, has_gpu=True) == footprint(
        facts, replace(OFFLOADED, activations="device"), has_gpu=True
    )


def test_one_that_stays_takes_its_copies_from_the_bus() -> None:
    facts, rates = model(8), SLOW_BUS
    found = [
        step_time(facts, replace(OFFLOADED, batch_rows=64, activations_on_device=count), rates)
        for count in range(9)
    ]
    saved_s = found[0].parts_s["upload_backward"] - found[8].parts_s["upload_backward"]
    assert saved_s == pytest.approx(8 * 8 * BLOCK_INPUT / rates.up_both)
    seconds = [one.step_s for one in found]
    assert seconds == sorted(seconds, reverse=True)
    assert seconds[8] < 0.8 * seconds[0]


@given(
    models(), st.integers(0, 1 << 36), st.integers(1, 32), st.integers(0, 10), st.integers(0, 10),
    st.booleans(),
)  # fmt: skip
def test_what_stays_is_all_that_fits_and_no_more(
    facts: ModelFacts, limit: int, rows: int, resident: int, kept: int, by_max: bool
) -> None:
    least = Layout(
        offload="max" if by_max else "weights", activations="host", resident_blocks=resident,
        blocks_without_recompute=kept, batch_rows=rows, chunk_rows=1,
    )  # fmt: skip
    found = left_on_device(facts, least, limit)
    count, waiting = found.activations_on_device, offloading_blocks(facts, least)
    assert replace(found, activations_on_device=0) == least
    assert 0 <= count <= waiting
    if count:
        assert footprint(facts, found, has_gpu=True).device_bytes <= limit
    if count < waiting:
        more = replace(least, activations_on_device=count + 1)
        assert footprint(facts, more, has_gpu=True).device_bytes > limit
    assert block_inputs_on_host_bytes(facts, found) <= block_inputs_on_host_bytes(facts, least)


@pytest.mark.parametrize("device_gib", [5, 6, 7])
def test_a_plan_fills_what_is_left_says_the_number_and_is_faster(device_gib: float) -> None:
    facts, request = model(16), RunRequest(batch_rows=64, device_groups=0, resident_blocks=0)
    plan = place(facts, room(device_gib), request, rates=SLOW_BUS)
    assert 0 < plan.layout.activations_on_device < 16
    told = {one.name: one for one in plan.choices}["placement.activations"]
    assert told.value == "host"
    words = f"the last {plan.layout.activations_on_device} of 16 blocks stay on the device"
    assert words in told.because
    assert plan.need == footprint(facts, replace(layout(plan), slots=plan.slots), has_gpu=True)
    every = place(facts, room(device_gib), replace(request, activations="host"), rates=SLOW_BUS)
    assert every.layout.activations_on_device == 0
    assert step_s(plan, facts, SLOW_BUS) < 0.95 * step_s(every, facts, SLOW_BUS)
    assert plan.host_bytes < every.host_bytes


def test_without_time_the_last_resort_is_filled_with_them_too() -> None:
    facts, request = model(8), RunRequest(batch_rows=64, chunk_rows=1)
    counts = []
    for size in (4.4, 4.8, 5.2, 5.6):
        plan = place(facts, room(size), request)
        if plan.offload == "max":
            counts.append(plan.layout.activations_on_device)
            told = {one.name: one.because for one in plan.choices}
            assert ("placement.activations" in told) == (plan.layout.activations_on_device > 0)
            assert plan.need == footprint(
                facts, replace(layout(plan), slots=plan.slots), has_gpu=True
            )
    assert max(counts) > 0


@pytest.mark.parametrize("wish", [{"activations": "host"}, {"offload": "max"}])
def test_a_wish_for_the_host_sends_all_of_them(wish: dict[str, str]) -> None:
    request = RunRequest(batch_rows=32, device_groups=0, **wish)  # type: ignore[arg-type]
    for plan in (
        place(model(8), room(20), request),
        place(model(8), room(20), request, rates=SLOW_BUS),
    ):
        assert plan.layout.activations_on_device == 0
        assert plan.layout.activations == "host"


@settings(max_examples=4, deadline=None)
@given(st.floats(4, 16), st.floats(0, 4), st.sampled_from([8, 32]), st.booleans())
@example(5.0, 1.0, 32, True)
def test_more_of_the_device_is_never_slower_on_a_bus_that_binds(
    device_gib: float, more_gib: float, rows: int, keeping: bool
) -> None:
    facts, request = measured(model()), RunRequest(batch_rows=rows, device_groups=0, chunk_rows=4)
    rates = RATES_KEEPING if keeping else RATES
    rates = replace(rates, h2d_bytes_per_s=3e9, d2h_bytes_per_s=3e9)
    try:
        small = place(facts, room(device_gib), request, rates=rates)
    except DoesNotFit:
        return
    large = place(facts, room(device_gib + more_gib), request, rates=rates)
    assert step_s(large, facts, rates) <= step_s(small, facts, rates) * (1 + 1e-9)


def test_every_stop_of_the_dial_holds_what_it_fills() -> None:
    search = Search(model(8), room(7), RunRequest(batch_rows=32, device_groups=0))
    dial = TimedSearch(search, SLOW_BUS)
    for share in (0.0, 0.3, 0.6, 1.0):
        chosen = dial.at(share)
        assert chosen is not None and chosen.size_bytes <= dial.limit_bytes(share)


def with_chunk(run: LiveRun, now: LiveSettings, rows: int) -> LiveSettings:
    return changed(run, now, Change(name="chunk_rows", value=rows))


def fallbacks(run: LiveRun, backward: bool = True) -> list[tuple[str, int]]:
    steps = fallback_steps(run, run.planned, backward=backward)
    return [(step.name, step.after) for step in steps]


def test_a_live_change_that_needs_their_room_gets_it() -> None:
    run = ground(activations="host", activations_on_device=4)
    now, peak = run.planned, run.device_bytes(run.planned, 0)
    larger = with_chunk(run, now, 3)
    assert larger.value("activations_on_device") < 4
    assert run.device_bytes(larger, 0) <= peak or not larger.value("activations_on_device")
    assert with_chunk(run, larger, 2) == now  # and back again
    assert with_chunk(run, now, 1).value("activations_on_device") == 4  # never more than planned


def test_when_memory_runs_out_they_go_first_and_come_back_by_no_other_change() -> None:
    run = ground(activations="host", activations_on_device=4)
    assert fallbacks(run)[:2] == [("activations_on_device", 0), ("chunk_rows", 1)]
    now = next(fallback_steps(run, run.planned)).settings
    assert run.device_bytes(run.planned, 0) - run.device_bytes(now, 0) == 5 * (8 << 20)
    left = run.left_with(now)
    assert fallbacks(left) == [("chunk_rows", 1)]
    assert with_chunk(left, now, 1).value("activations_on_device") == 0


def test_when_all_wait_on_the_device_they_go_to_the_host_first() -> None:
    run = ground(blocks_without_recompute=1, resident_blocks=2)
    first, second, *_ = fallback_steps(run, run.planned)
    assert (first.name, first.before, first.after) == ("activations_on_device", BLOCKS - 1, 0)
    assert (second.name, second.after) == ("blocks_without_recompute", 0)
    layout = run.placement_with(first.settings).layout
    assert (layout.activations, layout.activations_on_device) == ("host", 0)
    freed = run.device_bytes(run.planned, 0) - run.device_bytes(first.settings, 0)
    assert freed == (BLOCKS - INPUTS_IN_FLIGHT) * (8 << 20) > 0
    assert fallbacks(run.left_with(first.settings))[0] == ("blocks_without_recompute", 0)
    assert fallbacks(run, backward=False)[0] == ("chunk_rows", 1)


def test_they_stay_where_that_frees_nothing_and_without_a_gpu() -> None:
    few = ground(batch_rows=8, blocks_without_recompute=BLOCKS - 1, resident_blocks=BLOCKS)
    assert fallbacks(few)[0][0] == "blocks_without_recompute"
    assert fallbacks(ground(budget_bytes=None))[0][0] == "chunk_rows"
