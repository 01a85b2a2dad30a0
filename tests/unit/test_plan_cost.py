"""Predicted seconds: near what was measured, and never worse for a faster machine."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fluxtrain.plan.facts import GroupFacts, ModelFacts, RowFacts, activation_estimate
from fluxtrain.plan.footprint import Layout
from fluxtrain.plan.rates import Rates, rates_from
from fluxtrain.plan.simulation import step_time

# docs/benchmarks.md, "The measured machine", and the native AdamW there on 16 threads.
MEASURED = Rates(
    has_gpu=True,
    matmul_per_s=764e12,
    adamw_per_s=4.5e9,
    copy_bytes_per_s=62.2e9,
    h2d_bytes_per_s=55.4e9,
    d2h_bytes_per_s=55.3e9,
    h2d_both_bytes_per_s=52.4e9,
    d2h_both_bytes_per_s=50.8e9,
)
PER_S = {"gpu_matmul": 764e12, "adamw": 4.5e9, "h2d_pinned": 55.4e9, "d2h_pinned": 55.3e9}


def qwen(
    hidden: int, intermediate: int, layers: int, block: int, *, trained: bool = True
) -> ModelFacts:
    """Qwen2.5's shapes: tied embedding of 151,936, rows of 1024 tokens in bf16."""
    edge = 151_936 * hidden

    def group(name: str, size: int, users: int = 1) -> GroupFacts:
        return GroupFacts(
            name=name,
            kind="block" if name.startswith("layers") else "edge",
            weight_bytes=2 * size,
            trained_bf16=size if trained else 0,
            frozen=0 if trained else size,
            users=users,
        )

    return ModelFacts(
        groups=(
            group("embed_tokens", edge, users=2),
            *(group(f"layers.{i}", block) for i in range(layers)),
            group("norm", hidden),
        ),
        head_parameters=edge if trained else 0,
        row=RowFacts(
            hidden=hidden,
            vocabulary=151_936,
            sequence_length=1024,
            dtype_bytes=2,
            activation_bytes=activation_estimate(hidden, intermediate, 1024, 2),
        ),
    )


SMALL = qwen(1536, 8960, 28, 46_797_824)
LARGE = qwen(2048, 11_008, 36, 77_076_992)
STREAMED = Layout(offload="weights", batch_rows=8, chunk_rows=4)

ROWS = {  # docs/benchmarks.md, "Where the bytes live and what a step costs"
    "1.5B streamed": (SMALL, STREAMED, 0.527),
    "1.5B 12 groups": (SMALL, replace(STREAMED, device_groups=12), 0.369),
    "1.5B 24 groups": (SMALL, replace(STREAMED, device_groups=24), 0.314),
    "3B streamed": (LARGE, STREAMED, 0.914),
    "3B 12 groups": (LARGE, replace(STREAMED, device_groups=12), 0.765),
    "3B batch 32, 8 groups": (LARGE, replace(STREAMED, device_groups=8, batch_rows=32), 2.089),
    "1.5B resident": (SMALL, Layout(offload="none", batch_rows=8, chunk_rows=8), 0.245),
    "3B resident": (LARGE, Layout(offload="none", batch_rows=8, chunk_rows=8), 0.459),
    "3B batch 32 resident": (LARGE, Layout(offload="none", batch_rows=32, chunk_rows=32), 1.698),
}


@pytest.mark.parametrize("name", ROWS)
def test_measured_steps_are_predicted_within_twenty_percent(name: str) -> None:
    facts, layout, measured_s = ROWS[name]
    predicted_s = step_time(facts, layout, MEASURED).step_s
    print(f"{name}: {predicted_s:.3f} s, measured {measured_s:.3f}, "
          f"{100 * (predicted_s / measured_s - 1):+.1f} %")  # fmt: skip
    assert predicted_s == pytest.approx(measured_s, rel=0.2)


def test_what_binds_is_what_the_measurements_say() -> None:
    streamed = step_time(SMALL, STREAMED, MEASURED)
    assert streamed.binds == "AdamW on the host"
    assert streamed.parts_s["host_update"] > streamed.parts_s["forward"] + streamed.parts_s["head"]
    assert step_time(SMALL, replace(STREAMED, device_groups=24), MEASURED).binds == "the GPU"
    thin = replace(MEASURED, h2d_bytes_per_s=2e9, h2d_both_bytes_per_s=2e9)
    assert step_time(SMALL, STREAMED, thin).binds == "copies of weights to the GPU"


def test_groups_on_the_device_use_neither_bus_nor_host() -> None:
    all_there = step_time(SMALL, Layout(offload="none", batch_rows=8, chunk_rows=8), MEASURED)
    assert (
        all_there.parts_s["host_update"]
        == all_there.parts_s["download"]
        == all_there.parts_s["upload_forward"]
        == 0
    )
    twelve = step_time(SMALL, replace(STREAMED, device_groups=12), MEASURED)
    streamed = step_time(SMALL, STREAMED, MEASURED)
    for name in ("host_update", "download", "upload_forward", "upload_backward"):
        assert twelve.parts_s[name] < streamed.parts_s[name]
    assert twelve.parts_s["backward"] == streamed.parts_s["backward"]


def test_resident_weights_come_up_once_and_streamed_ones_twice() -> None:
    resident = step_time(SMALL, replace(STREAMED, resident_blocks=28), MEASURED)
    streamed = step_time(SMALL, STREAMED, MEASURED)
    assert resident.parts_s["upload_backward"] == 0 < streamed.parts_s["upload_backward"]
    assert resident.parts_s["upload_forward"] == pytest.approx(streamed.parts_s["upload_forward"])
    assert resident.parts_s["host_update"] == streamed.parts_s["host_update"]


def test_frozen_weights_need_no_update_and_no_gradients() -> None:
    frozen = step_time(qwen(1536, 8960, 28, 46_797_824, trained=False), STREAMED, MEASURED)
    trained = step_time(SMALL, STREAMED, MEASURED)
    assert frozen.parts_s["host_update"] == frozen.parts_s["download"] == 0
    assert frozen.parts_s["backward"] < trained.parts_s["backward"]
    assert frozen.parts_s["forward"] == trained.parts_s["forward"]


def test_accumulated_passes_pay_for_one_update() -> None:
    one, four = (step_time(SMALL, STREAMED, MEASURED, passes=n) for n in (1, 4))
    assert four.work.tokens == 4 * one.work.tokens
    assert four.parts_s["host_update"] == one.parts_s["host_update"]
    assert one.step_s < four.step_s < 4 * one.step_s


def test_without_a_gpu_nothing_overlaps() -> None:
    rates = Rates(has_gpu=False, matmul_per_s=90e9, adamw_per_s=650e6, copy_bytes_per_s=5e9)
    found = step_time(SMALL, STREAMED, rates)
    names = ("forward", "head", "backward", "upload_forward", "upload_backward", "download",
             "host_update")  # fmt: skip
    parts = [found.parts_s[name] for name in names]
    assert found.step_s == pytest.approx(sum(parts))
    assert found.binds == "the processor"


def test_a_missing_rate_is_named() -> None:
    assert isinstance(rates_from(PER_S, has_gpu=True), Rates)
    missing = rates_from({**PER_S, "adamw": None}, has_gpu=True)
    assert missing == "not measured on this machine: adamw"
    assert "host_copy" in str(rates_from({"cpu_matmul": 1e9, "adamw": 1e9}, has_gpu=False))


per_s = st.floats(0.1, 100)
layouts = st.builds(
    Layout,
    offload=st.sampled_from(["weights", "weights", "max", "none", "optimizer"]),
    device_groups=st.integers(0, 31),
    resident_blocks=st.integers(0, 28),
    batch_rows=st.integers(1, 64),
    chunk_rows=st.integers(1, 64),
)


@given(layouts, per_s, per_s, per_s, per_s, st.sampled_from(
    ["matmul_per_s", "adamw_per_s", "copy_bytes_per_s", "h2d_bytes_per_s", "d2h_bytes_per_s"]
), st.booleans(), st.booleans())  # fmt: skip
def test_a_faster_machine_is_never_predicted_slower(
    layout: Layout, matmul: float, adamw: float, up: float, down: float, name: str,
    clips: bool, has_gpu: bool,
) -> None:  # fmt: skip
    rates = Rates(
        has_gpu=has_gpu,
        matmul_per_s=matmul * 1e13,
        adamw_per_s=adamw * 1e8,
        copy_bytes_per_s=up * 1e9,
        h2d_bytes_per_s=up * 1e9 if has_gpu else None,
        d2h_bytes_per_s=down * 1e9 if has_gpu else None,
    )
    doubled: dict[str, Any] = {name: 2 * (getattr(rates, name) or 1e9)}
    faster = replace(rates, **doubled)
    if not has_gpu and name in ("h2d_bytes_per_s", "d2h_bytes_per_s"):
        return
    before, after = (step_time(SMALL, layout, one, clips=clips).step_s for one in (rates, faster))
    assert after <= before * (1 + 1e-12)


@given(layouts)
def test_one_more_group_on_the_device_is_never_predicted_slower(layout: Layout) -> None:
    """With the same blocks resident: what moves in leaves the rest as it is."""
    layout = replace(layout, offload="weights", resident_blocks=0)
    more = replace(layout, device_groups=layout.device_groups + 1)
    assert step_time(SMALL, more, MEASURED).step_s <= step_time(SMALL, layout, MEASURED).step_s * (
        1 + 1e-12
    )


@pytest.mark.parametrize(
    ("measured", "update_s"), [(None, 14.0625 / 26), (7e9, 4.5 / 7), (9e9, 14.0625 / 26)]
)
def test_8_bit_states_are_updated_at_the_rate_of_their_bytes_but_no_faster_than_measured(
    measured: float | None, update_s: float
) -> None:
    n = 4_500_000_000  # one second of an update with fp32 states
    block = GroupFacts(name="layers.0", kind="block", weight_bytes=2 * n, trained_bf16=n, narrow=n)
    row = RowFacts(hidden=64, vocabulary=100, sequence_length=8, dtype_bytes=2, activation_bytes=1)
    facts = ModelFacts(groups=(block,), row=row)
    rates = replace(MEASURED, adamw_8bit_per_s=measured)
    layout = Layout(offload="weights", batch_rows=1, chunk_rows=1)
    assert step_time(facts, layout, rates).parts_s["host_update"] == pytest.approx(1.0)
    narrow = step_time(facts.with_states("8bit"), layout, rates)
    assert narrow.parts_s["host_update"] == pytest.approx(update_s, rel=1e-3)
    assert step_time(facts.with_states("bf16"), layout, rates).parts_s[
        "host_update"
    ] == pytest.approx(18 / 26)


def test_fp16_masters_take_longer_than_the_bytes_of_their_update() -> None:
    n = 4_500_000_000
    row = RowFacts(hidden=64, vocabulary=100, sequence_length=8, dtype_bytes=2, activation_bytes=1)
    block = GroupFacts(name="layers.0", kind="block", weight_bytes=2 * n, trained_fp16=n)
    layout = Layout(offload="weights", batch_rows=1, chunk_rows=1)
    found = step_time(ModelFacts(groups=(block,), row=row), layout, MEASURED).parts_s["host_update"]
    assert found == pytest.approx(1.5 * 28 / 26)
