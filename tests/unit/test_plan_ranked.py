"""Fast, balanced and fit: within the budget, and more of a machine never makes one slower."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fluxtrain.errors import BadInput
from fluxtrain.plan.choices.ranked import STOPS, Frontier, RankedPlan
from fluxtrain.plan.cost.rates import Rates
from fluxtrain.plan.facts import Capacity, GroupFacts, ModelFacts, RowFacts, activation_estimate
from fluxtrain.plan.machine_file import read_machine_file
from fluxtrain.plan.request import RunRequest
from fluxtrain.plan.search import AUTO_SHARE, HOST_SHARE, Search
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
) -> Frontier:
    device = None if device_gib is None else int(device_gib * GIB)
    room = Capacity(device_free_bytes=device, host_available_bytes=int(host_gib * GIB))
    return Frontier(Search(model(), room, RunRequest(**{"batch_rows": 8, **request})), rates)


def by_name(plans: tuple[RankedPlan, ...]) -> dict[str, RankedPlan]:
    return {plan.name: plan for plan in plans}


def test_the_stops_run_from_the_fastest_to_the_smallest() -> None:
    plans = dial(8).plans()
    assert [plan.name for plan in plans] == list(STOPS) == ["fast", "balanced", "fit"]
    times = [plan.chosen.cost.step_s for plan in plans]
    sizes = [plan.chosen.need.device_bytes for plan in plans]
    assert times == sorted(times)
    assert sizes == sorted(sizes, reverse=True)
    assert len(set(sizes)) == 3
    assert sizes[-1] == min(one.size_bytes for one in dial(8).candidates)


def test_with_ample_room_the_fastest_is_an_ordinary_trainer() -> None:
    fast = by_name(dial(80).plans())["fast"].chosen
    assert fast.layout.offload == "none"
    assert fast.cost.binds == "the GPU"
    assert fast.need.host_bytes == 0


def test_each_stop_gives_every_row_of_the_same_batch() -> None:
    assert {plan.chosen.layout.batch_rows for plan in dial(8).plans()} == {8}


def test_without_a_gpu_the_dial_limits_host_memory() -> None:
    rates = Rates(has_gpu=False, matmul_per_s=1e11, adamw_per_s=1e9, copy_bytes_per_s=1e10)
    found = dial(None, 64, rates)
    plans = by_name(found.plans())
    assert plans["fit"].chosen.need.host_bytes == min(one.size_bytes for one in found.candidates)
    assert plans["fast"].chosen.cost.step_s <= plans["fit"].chosen.cost.step_s
    assert {one.layout.device_groups for one in found.candidates} == {0}


def test_nothing_that_fits_gives_no_plan() -> None:
    assert dial(0.5).plans() == ()
    assert dial(8, host_gib=1).plans() == ()


def test_a_wish_for_an_offload_is_kept() -> None:
    for offload in ("weights", "optimizer", "max"):
        assert {p.chosen.layout.offload for p in dial(40, offload=offload).plans()} == {offload}


gib = st.floats(2, 40)


@settings(max_examples=6)
@given(gib, st.floats(4, 64), st.floats(0, 1))
def test_no_stop_is_over_its_limit_the_budget_or_the_host(
    device_gib: float, host_gib: float, share: float
) -> None:
    found = dial(device_gib, host_gib)
    if not found.candidates:
        return
    chosen = found.at(share)
    assert chosen.need.device_bytes <= found.limit_bytes(share) <= device_gib * GIB * AUTO_SHARE
    assert chosen.need.host_bytes <= host_gib * GIB * HOST_SHARE


@settings(max_examples=6)
@given(gib, st.floats(0, 40), st.floats(4, 64), st.floats(0, 40))
def test_more_memory_never_predicts_a_slower_step(
    device_gib: float, more_device: float, host_gib: float, more_host: float
) -> None:
    before = dial(device_gib, host_gib).plans()
    if not before:
        return
    after = dial(device_gib + more_device, host_gib + more_host)
    assert after.at(1.0).cost.step_s <= before[0].chosen.cost.step_s


@settings(max_examples=6)
@given(gib, st.floats(1, 10), st.sampled_from(["matmul_per_s", "adamw_per_s", "h2d_bytes_per_s",
                                               "d2h_bytes_per_s"]))  # fmt: skip
def test_a_faster_machine_never_makes_the_fastest_plan_slower(
    device_gib: float, factor: float, name: str
) -> None:
    found = dial(device_gib)
    if not found.candidates:
        return
    faster = dial(device_gib, rates=replace(RATES, **{name: factor * getattr(RATES, name)}))
    assert faster.at(1.0).cost.step_s <= found.at(1.0).cost.step_s * (1 + 1e-12)


@settings(max_examples=6)
@given(gib, st.floats(0, 1), st.floats(0, 1))
def test_turning_the_dial_up_never_slows_down(device_gib: float, one: float, other: float) -> None:
    found = dial(device_gib)
    if not found.candidates:
        return
    low, high = sorted((one, other))
    assert found.at(high).cost.step_s <= found.at(low).cost.step_s


# --- a machine from a file ------------------------------------------------------------------------

LEAST = {
    "machine": {"memory_total_bytes": 64 * GIB, "gpus": [{"memory_total_bytes": 24 * GIB}]},
    "rates": {"gpu_matmul": 1.6e14, "adamw": {"per_s": 1.5e9, "how": "timed"}, "pin": None},
}


def written(folder: Path, content: Any) -> Path:
    path = folder / "machine.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


def test_a_machine_is_read_from_the_least_that_says_it(tmp_path: Path) -> None:
    found = read_machine_file(written(tmp_path, LEAST))
    assert found.capacity == Capacity(device_free_bytes=24 * GIB, host_available_bytes=64 * GIB)
    assert found.per_s == {"gpu_matmul": 1.6e14, "adamw": 1.5e9, "pin": None}
    assert "24.0 GiB" in found.line


def test_what_is_free_counts_more_than_what_is_built_in(tmp_path: Path) -> None:
    machine = {
        "memory_total_bytes": 64 * GIB, "memory_available_bytes": 50 * GIB,
        "gpus": [{"name": "card", "memory_total_bytes": 24 * GIB, "memory_free_bytes": 22 * GIB}],
    }  # fmt: skip
    found = read_machine_file(written(tmp_path, {"machine": machine}))
    assert found.capacity == Capacity(device_free_bytes=22 * GIB, host_available_bytes=50 * GIB)
    assert "card 22.0 GiB" in found.line
    assert found.per_s == {}


@pytest.mark.parametrize(
    ("content", "named"),
    [
        ("not json", "is not JSON"),
        ([], "has no 'machine'"),
        ({"machine": {}}, "memory_total_bytes"),
        ({"machine": {"memory_total_bytes": GIB, "gpus": [{}]}}, "memory_total_bytes"),
        ({"machine": {"memory_total_bytes": GIB}, "rates": {"adamw": -1}}, "the rate adamw is -1"),
        (
            {"machine": {"memory_total_bytes": GIB}, "rates": {"adamw": 1e-30}},
            "the rate adamw is 1e",
        ),
        ({"machine": {"memory_total_bytes": GIB}, "rates": {"adamw": math.nan}}, "adamw is nan"),
        ({"machine": {"memory_total_bytes": GIB}, "rates": {"adamw": math.inf}}, "adamw is inf"),
        ({"machine": {"memory_total_bytes": GIB}, "rates": [1, 2]}, "rates is no object"),
        ({"machine": {"memory_total_bytes": GIB, "gpus": {"a": 1}}}, "gpus is no list"),
        ({"machine": {"memory_total_bytes": GIB, "gpus": "card"}}, "gpus is no list"),
        ({"machine": {"memory_total_bytes": GIB, "gpus": [5]}}, "memory_total_bytes"),
        ({"machine": {"memory_total_bytes": math.inf}}, "memory_total_bytes"),
        ({"machine": {"memory_total_bytes": math.nan}}, "memory_total_bytes"),
        ({"machine": {"memory_total_bytes": 10**400}}, "memory_total_bytes"),
        ({"machine": {"memory_total_bytes": GIB}, "disk": {"free_bytes": math.inf}}, "free_bytes"),
    ],
)
def test_a_file_that_says_too_little_is_refused(tmp_path: Path, content: Any, named: str) -> None:
    with pytest.raises(BadInput, match=named):
        read_machine_file(written(tmp_path, content))


def test_a_cards_name_that_a_terminal_would_obey_is_only_shown(tmp_path: Path) -> None:
    machine = {
        "memory_total_bytes": 64 * GIB,
        "gpus": [{"name": "\x1b[31mcard\n" + "x" * 500, "memory_total_bytes": 24 * GIB}],
    }
    line = read_machine_file(written(tmp_path, {"machine": machine})).line
    assert line.isprintable()
    assert "[31mcardxxx" in line
    assert len(line) < 150


def test_all_cards_of_a_file_are_read_in_torchs_order(tmp_path: Path) -> None:
    gpus = [
        {"index": at, "name": name, "memory_total_bytes": size * GIB, "compute_capability": "8.9"}
        for at, (name, size) in enumerate([("small", 8), ("large", 24), ("other", 16)])
    ]
    machine = {"memory_total_bytes": 64 * GIB, "gpus": gpus}
    found = read_machine_file(written(tmp_path, {"machine": machine}))
    assert found.cards is not None
    assert [card.free_bytes for card in found.cards.cards] == [8 * GIB, 24 * GIB, 16 * GIB]
    assert all(text in found.line for text in ("small 8.00 GiB", "large 24.0 GiB"))
    seen = [
        {"index": 0, "gpu": 1, "name": "large", "memory_free_bytes": 23 * GIB},
        {"index": 1, "gpu": 0, "name": "small", "unusable": "other programs fill it: end them"},
    ]
    found = read_machine_file(written(tmp_path, {"machine": machine, "cards": seen}))
    assert found.cards is not None
    assert [(card.name, card.free_bytes, card.unusable) for card in found.cards.cards] == [
        ("large", 23 * GIB, ""), ("small", 8 * GIB, "other programs fill it: end them"),
    ]  # fmt: skip
    assert found.capacity.device_free_bytes == 23 * GIB


def test_a_card_without_bf16_beside_one_that_has_it_cannot_be_used(tmp_path: Path) -> None:
    gpus = [{"memory_total_bytes": 24 * GIB, "compute_capability": told} for told in ("8.9", "7.5")]
    machine = {"memory_total_bytes": 64 * GIB, "gpus": gpus}
    found = read_machine_file(written(tmp_path, {"machine": machine}))
    assert found.cards is not None
    assert [bool(card.unusable) for card in found.cards.cards] == [False, True]


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="cannot be read"):
        read_machine_file(tmp_path / "none.json")
