"""What `train` takes: the fastest predicted layout that fits, never slower for more memory."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fluxtrain.errors import DoesNotFit
from fluxtrain.plan.calibration import Calibration, Line
from fluxtrain.plan.choose import ADAPTERS_SHARE, HIDDEN_SHARE, HIDDEN_TIMES, place
from fluxtrain.plan.facts import Capacity, GroupFacts, ModelFacts, RowFacts, activation_estimate
from fluxtrain.plan.footprint import Layout, footprint
from fluxtrain.plan.placement import Placement
from fluxtrain.plan.rates import Rates
from fluxtrain.plan.request import RunRequest
from fluxtrain.plan.search import AUTO_SHARE, HOST_SHARE, STOPS, Search, TimedSearch
from fluxtrain.plan.simulation import step_time
from fluxtrain.units import GIB
from tests.unit.plan_models import group, room

BLOCK, EDGE = 46_797_824, 233_373_696  # Qwen2.5-1.5B's
TRIED = Calibration(
    forward=Line(base=0.0006, slope=0.0001),
    backward=Line(base=0.001, slope=0.0003),
    outside_forward=Line(base=0.002, slope=0.0023),
    outside_backward=Line(base=0.0023, slope=0.0),
    activation_bytes=91_619_328,
    device_update_s=1.6e-11,
    adamw_per_s=4.5e9,
    rows=(1, 4),
    measured_at_s=0.0,
    measuring_s=2.0,
)
RATES = Rates(
    has_gpu=True,
    matmul_per_s=7e14,
    adamw_per_s=4.5e9,
    h2d_bytes_per_s=55e9,
    d2h_bytes_per_s=55e9,
    calibration=TRIED,
)
SEARCHED = 1.03  # how much slower a plan with more memory may be (docs/decisions/0021)
KEPT_BYTES = 60_000_000  # of a block and row
KEEPING = replace(TRIED, kept_backward=Line(base=0.0008, slope=0.0002), kept_bytes=KEPT_BYTES)
RATES_KEEPING = replace(RATES, calibration=KEEPING)


def model(layers: int = 8, length: int = 1024) -> ModelFacts:
    """Blocks of that model, fewer of them so that the search is short."""

    return ModelFacts(
        groups=(
            group("embed_tokens", EDGE, users=2),
            *(group(f"layers.{i}", BLOCK) for i in range(layers)),
            group("norm", 1536),
        ),
        head_parameters=EDGE,
        row=RowFacts(
            hidden=1536,
            vocabulary=151_936,
            sequence_length=length,
            dtype_bytes=2,
            activation_bytes=activation_estimate(1536, 8960, length, 2),
        ),
    )


def measured(facts: ModelFacts) -> ModelFacts:
    assert facts.row is not None
    return replace(facts, row=replace(facts.row, saved_bytes=KEPT_BYTES))


def test_what_is_left_of_the_device_keeps_activations() -> None:
    facts, request = measured(model()), RunRequest(batch_rows=8)
    again = place(facts, room(14), request, rates=RATES)
    some = place(facts, room(14), request, rates=RATES_KEEPING)
    every = place(facts, room(40), request, rates=RATES_KEEPING)
    assert again.layout.blocks_without_recompute == 0
    assert 0 < some.layout.blocks_without_recompute < 8
    assert every.layout.blocks_without_recompute == 8
    assert some.need.kept_bytes == some.layout.blocks_without_recompute * 8 * KEPT_BYTES
    one_more = replace(
        layout(some), blocks_without_recompute=some.layout.blocks_without_recompute + 1
    )
    assert footprint(facts, one_more, has_gpu=True).device_bytes > 14 * GIB * AUTO_SHARE
    saved_s = 8 * (TRIED.backward.at(8) - KEEPING.kept_backward.at(8))  # type: ignore[union-attr]
    faster = step_s(again, facts) - step_s(every, facts, RATES_KEEPING)
    assert faster == pytest.approx(saved_s, rel=0.1)


def test_asking_for_no_kept_blocks_keeps_none() -> None:
    facts, request = measured(model()), RunRequest(batch_rows=8, blocks_without_recompute=0)
    plan = place(facts, room(40), request, rates=RATES_KEEPING)
    assert plan.layout.blocks_without_recompute == 0
    assert {c.name: c.because for c in plan.choices}[
        "placement.blocks_without_recompute"
    ] == "as set"


def test_a_timed_plan_keeps_as_many_blocks_as_can_keep_and_says_so() -> None:
    request = RunRequest(
        batch_rows=8, offload="max", device_groups=0, blocks_without_recompute=5, resident_blocks=0
    )
    plan = place(measured(model()), room(40), request, rates=RATES_KEEPING)
    told = {choice.name: (choice.value, choice.because) for choice in plan.choices}
    assert told["placement.blocks_without_recompute"] == (
        "0",
        "5 as set, and the weights of 0 blocks stay on the device",
    )


def step_s(plan: Placement, facts: ModelFacts, rates: Rates = RATES) -> float:
    return step_time(facts, layout(plan), rates, clips=not plan.optimizer_in_backward).step_s


def layout(plan: Placement) -> Layout:
    return replace(plan.layout, passes=1, embedding="whole", head="whole")


@settings(max_examples=5)
@given(
    st.floats(3, 20), st.floats(0, 8), st.sampled_from([1, 4, 8]), st.floats(6, 30), st.booleans(),
    st.booleans(),
)  # fmt: skip
def test_more_memory_is_hardly_ever_slower_and_the_budget_is_kept(
    device_gib: float, more_gib: float, rows: int, host_gib: float, keeping: bool, in_backward: bool
) -> None:
    facts, request = (
        measured(model()),
        RunRequest(batch_rows=rows, optimizer_in_backward=in_backward),
    )
    rates = RATES_KEEPING if keeping else RATES
    try:
        small = place(facts, room(device_gib, host_gib), request, rates=rates)
    except DoesNotFit:
        return
    large = place(facts, room(device_gib + more_gib, host_gib), request, rates=rates)
    roomy = place(facts, room(device_gib, host_gib + more_gib), request, rates=rates)
    for more in (large, roomy):
        assert step_s(more, facts, rates) <= step_s(small, facts, rates) * SEARCHED
    assert small.device_bytes <= device_gib * GIB * AUTO_SHARE
    assert small.need.host_bytes <= host_gib * GIB * HOST_SHARE
    assert small.need == footprint(
        facts, replace(layout(small), optimizer_in_backward=in_backward), has_gpu=True
    )


def test_it_is_never_slower_than_the_rule_that_knows_no_time() -> None:
    facts = model(16)
    for size in (4, 6, 8, 12, 16, 24):
        request = RunRequest(batch_rows=8)
        assert step_s(place(facts, room(size), request, rates=RATES), facts) <= step_s(
            place(facts, room(size), request), facts
        ) * (1 + 1e-9)


def test_the_batch_is_the_smallest_that_hides_the_copies() -> None:
    facts = model()
    plan = place(facts, room(5), RunRequest(), rates=RATES)

    def tokens_per_s(rows: int) -> float:
        one = place(facts, room(5), RunRequest(batch_rows=rows), rates=RATES)
        return rows / step_s(one, facts)

    best = max(tokens_per_s(rows) for rows in (1, 2, 4, 8, 16, 32))
    assert tokens_per_s(plan.batch_rows) >= HIDDEN_SHARE * best
    assert tokens_per_s(plan.batch_rows // 2) < HIDDEN_SHARE * best
    reasons = {choice.name: choice.because for choice in plan.choices}
    assert "tokens/s" in reasons["train.batch_rows"]
    assert "fastest predicted" in reasons["placement.offload"]


def with_adapters(facts: ModelFacts) -> ModelFacts:
    """The same with 2 of 100 elements of each block trained, and the others frozen."""

    def frozen(group: GroupFacts) -> GroupFacts:
        trained = group.trained_bf16 // 50 if group.kind == "block" else 0
        return replace(group, trained_bf16=trained, frozen=group.trained_bf16 - trained)

    groups = tuple(frozen(group) for group in facts.groups)
    return replace(facts, groups=groups, head_parameters=0)


@pytest.mark.parametrize("bus_bytes_per_s", [5e9, 25e9, 55e9])
def test_adapters_get_the_smallest_batch_that_hides_the_copies_twice(
    bus_bytes_per_s: float,
) -> None:
    facts = with_adapters(model(layers=16))
    rates = replace(RATES, h2d_bytes_per_s=bus_bytes_per_s, d2h_bytes_per_s=bus_bytes_per_s)
    plan = place(facts, room(5), RunRequest(), rates=rates)
    found = {}
    for rows in (1, 2, 4, 8, 16, 32):
        one = place(facts, room(5), RunRequest(batch_rows=rows), rates=rates)
        spent = step_time(facts, layout(one), rates)
        copies_s = spent.parts_s["upload_forward"] + spent.parts_s["upload_backward"]
        computing_s = spent.parts_s["forward"] + spent.parts_s["head"] + spent.parts_s["backward"]
        found[rows] = spent.tokens_per_s, computing_s >= HIDDEN_TIMES * copies_s
    best = max(tokens_per_s for tokens_per_s, _ in found.values())
    enough = [
        rows
        for rows, (tokens_per_s, hidden) in found.items()
        if tokens_per_s >= (ADAPTERS_SHARE if hidden else HIDDEN_SHARE) * best
    ]
    assert plan.batch_rows == min(enough)
    [why] = [one.because for one in plan.choices if one.name == "train.batch_rows"]
    if found[plan.batch_rows][1] and plan.batch_rows < max(found):
        assert "the bus needs no larger batch" in why


def test_wishes_are_kept() -> None:
    facts = model()
    request = RunRequest(
        batch_rows=8, chunk_rows=2, device_groups=3, resident_blocks=1, activations="device"
    )
    plan = place(facts, room(16), request, rates=RATES)
    assert (plan.layout.device_groups, plan.layout.resident_blocks, plan.chunk_rows) == (3, 1, 2)
    assert plan.layout.activations == "device"
    assert {c.name: c.because for c in plan.choices}["placement.device_groups"] == "as set"
    streamed = place(facts, room(16), RunRequest(batch_rows=8, offload="weights"), rates=RATES)
    assert streamed.offload == "weights"


def test_without_time_or_without_a_gpu_the_rule_decides() -> None:
    facts, request = model(), RunRequest(batch_rows=8)
    assert place(facts, room(8), request) == place(facts, room(8), request)
    cpu = Capacity(device_free_bytes=None, host_available_bytes=64 * GIB)
    assert place(facts, cpu, request, rates=RATES) == place(facts, cpu, request)
    least = RunRequest(batch_rows=8, offload="max")
    assert place(facts, room(8), least, rates=RATES) == place(facts, room(8), least)


def test_what_does_not_fit_is_refused_as_by_the_rule() -> None:
    with pytest.raises(DoesNotFit, match="of device memory"):
        place(model(), room(1), RunRequest(batch_rows=8), rates=RATES)


def dial(
    device_gib: float, host_gib: float = 64, rates: Rates = RATES, **asked: Any
) -> TimedSearch:
    request = RunRequest(**{"batch_rows": 8, **asked})
    return TimedSearch(Search(model(), room(device_gib, host_gib), request), rates)


def test_the_stops_run_from_the_fastest_to_the_smallest() -> None:
    plans = dial(8).stops()
    assert [plan.name for plan in plans] == list(STOPS) == ["fast", "balanced", "fit"]
    times = [plan.chosen.time.step_s for plan in plans]
    sizes = [plan.chosen.need.device_bytes for plan in plans]
    assert times == sorted(times)
    assert sizes == sorted(sizes, reverse=True) and len(set(sizes)) == 3


def test_with_ample_room_the_fastest_is_an_ordinary_trainer() -> None:
    slow_host = replace(RATES, calibration=None, adamw_per_s=1.5e9)
    fast = dial(80, rates=slow_host).stops()[0].chosen
    assert (fast.layout.offload, fast.need.host_bytes) == ("none", 0)
    assert fast.time.binds == "the GPU"


def test_the_dial_keeps_an_offload_and_has_no_stop_where_nothing_fits() -> None:
    for offload in ("weights", "optimizer", "max"):
        assert {p.chosen.layout.offload for p in dial(40, offload=offload).stops()} == {offload}
    assert dial(0.5).stops() == dial(8, host_gib=1).stops() == ()


@settings(max_examples=6)
@given(st.floats(2, 40), st.floats(4, 64), st.floats(0, 1), st.floats(0, 1))
def test_turning_the_dial_up_is_never_slower_and_takes_its_limit_at_most(
    device_gib: float, host_gib: float, one: float, other: float
) -> None:
    found = dial(device_gib, host_gib)
    slower, faster = (found.at(share) for share in sorted((one, other)))
    if slower is None or faster is None:
        return
    assert faster.time.step_s <= slower.time.step_s
    limit_bytes = found.limit_bytes(max(one, other))
    assert faster.need.device_bytes <= limit_bytes <= device_gib * GIB * AUTO_SHARE
    assert faster.need.host_bytes <= host_gib * GIB * HOST_SHARE


@settings(max_examples=6)
@given(st.floats(2, 40), st.floats(1, 10), st.sampled_from(["h2d_bytes_per_s", "d2h_bytes_per_s"]))
def test_a_faster_bus_never_makes_the_fastest_plan_slower(
    device_gib: float, factor: float, name: str
) -> None:
    rates = replace(RATES, **{name: factor * getattr(RATES, name)})
    before, after = dial(device_gib).at(1.0), dial(device_gib, rates=rates).at(1.0)
    if before is not None and after is not None:
        assert after.time.step_s <= before.time.step_s * SEARCHED
