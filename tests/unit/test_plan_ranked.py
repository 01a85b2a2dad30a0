"""Fast, balanced and fit: within the budget, and more of a machine never makes one slower."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from fluxtrain.plan.facts import Capacity, GroupFacts, ModelFacts, RowFacts, activation_estimate
from fluxtrain.plan.rates import Rates
from fluxtrain.plan.request import RunRequest
from fluxtrain.plan.search import (
    AUTO_SHARE,
    HOST_SHARE,
    STOPS,
    DialStop,
    Search,
    TimedLayout,
    TimedSearch,
)
from fluxtrain.units import GIB

RATES = Rates(
    has_gpu=True,
    matmul_per_s=160e12,
    adamw_per_s=1.5e9,
    copy_bytes_per_s=30e9,
    h2d_bytes_per_s=25e9,
    d2h_bytes_per_s=25e9,
)


def model(layers: int = 6, block: int = 60_000_000, edge: int = 150_000_000) -> ModelFacts:
    def group(name: str, size: int, users: int = 1) -> GroupFacts:
        return GroupFacts(
            name=name,
            kind="block" if name.startswith("layers") else "edge",
            weight_bytes=2 * size,
            trained_bf16=size,
            users=users,
        )

    return ModelFacts(
        groups=(
            group("embed_tokens", edge, users=2),
            *(group(f"layers.{i}", block) for i in range(layers)),
            group("norm", 2048),
        ),
        head_parameters=edge,
        row=RowFacts(
            hidden=2048,
            vocabulary=edge // 2048,
            sequence_length=512,
            dtype_bytes=2,
            activation_bytes=activation_estimate(2048, 8192, 512, 2),
        ),
    )


def dial(
    device_gib: float | None = 12, host_gib: float = 64, rates: Rates = RATES, **request: Any
) -> TimedSearch:
    device = None if device_gib is None else int(device_gib * GIB)
    room = Capacity(device_free_bytes=device, host_available_bytes=int(host_gib * GIB))
    return TimedSearch(Search(model(), room, RunRequest(**{"batch_rows": 8, **request})), rates)


def at(found: TimedSearch, share: float) -> TimedLayout:
    chosen = found.at(share)
    assert chosen is not None
    return chosen


def by_name(plans: tuple[DialStop, ...]) -> dict[str, DialStop]:
    return {plan.name: plan for plan in plans}


def test_the_stops_run_from_the_fastest_to_the_smallest() -> None:
    plans = dial(8).stops()
    assert [plan.name for plan in plans] == list(STOPS) == ["fast", "balanced", "fit"]
    times = [plan.chosen.time.step_s for plan in plans]
    sizes = [plan.chosen.need.device_bytes for plan in plans]
    assert times == sorted(times)
    assert sizes == sorted(sizes, reverse=True)
    assert len(set(sizes)) == 3


def test_with_ample_room_the_fastest_is_an_ordinary_trainer() -> None:
    fast = by_name(dial(80).stops())["fast"].chosen
    assert fast.layout.offload == "none"
    assert fast.time.binds == "the GPU"
    assert fast.need.host_bytes == 0


def test_each_stop_gives_every_row_of_the_same_batch() -> None:
    assert {plan.chosen.layout.batch_rows for plan in dial(8).stops()} == {8}


def test_without_a_gpu_the_dial_limits_host_memory() -> None:
    rates = Rates(has_gpu=False, matmul_per_s=1e11, adamw_per_s=1e9, copy_bytes_per_s=1e10)
    found = dial(None, 64, rates)
    plans = by_name(found.stops())
    assert plans["fast"].chosen.time.step_s <= plans["fit"].chosen.time.step_s
    assert {plan.chosen.layout.device_groups for plan in plans.values()} == {0}


def test_nothing_that_fits_gives_no_plan() -> None:
    assert dial(0.5).stops() == ()
    assert dial(8, host_gib=1).stops() == ()


def test_a_wish_for_an_offload_is_kept() -> None:
    for offload in ("weights", "optimizer", "max"):
        assert {p.chosen.layout.offload for p in dial(40, offload=offload).stops()} == {offload}


gib = st.floats(2, 40)


@settings(max_examples=6)
@given(gib, st.floats(4, 64), st.floats(0, 1))
def test_no_stop_is_over_its_limit_the_budget_or_the_host(
    device_gib: float, host_gib: float, share: float
) -> None:
    found = dial(device_gib, host_gib)
    if found.at(0.0) is None:
        return
    chosen = at(found, share)
    assert chosen.need.device_bytes <= found.limit_bytes(share) <= device_gib * GIB * AUTO_SHARE
    assert chosen.need.host_bytes <= host_gib * GIB * HOST_SHARE


@settings(max_examples=6)
@given(gib, st.floats(0, 40), st.floats(4, 64), st.floats(0, 40))
def test_more_memory_never_predicts_a_slower_step(
    device_gib: float, more_device: float, host_gib: float, more_host: float
) -> None:
    before = dial(device_gib, host_gib).stops()
    if not before:
        return
    after = dial(device_gib + more_device, host_gib + more_host)
    assert at(after, 1.0).time.step_s <= before[0].chosen.time.step_s


@settings(max_examples=6)
@given(gib, st.floats(1, 10), st.sampled_from(["matmul_per_s", "adamw_per_s", "h2d_bytes_per_s",
                                               "d2h_bytes_per_s"]))  # fmt: skip
def test_a_faster_machine_never_makes_the_fastest_plan_slower(
    device_gib: float, factor: float, name: str
) -> None:
    found = dial(device_gib)
    if found.at(0.0) is None:
        return
    faster = dial(device_gib, rates=replace(RATES, **{name: factor * getattr(RATES, name)}))
    assert at(faster, 1.0).time.step_s <= at(found, 1.0).time.step_s * (1 + 1e-12)


@settings(max_examples=6)
@given(gib, st.floats(0, 1), st.floats(0, 1))
def test_turning_the_dial_up_never_slows_down(device_gib: float, one: float, other: float) -> None:
    found = dial(device_gib)
    if found.at(0.0) is None:
        return
    low, high = sorted((one, other))
    assert at(found, high).time.step_s <= at(found, low).time.step_s
