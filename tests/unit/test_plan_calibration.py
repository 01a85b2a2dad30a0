"""What was measured at two sizes becomes a line, and a plan is timed by it."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fluxtrain.plan.calibration import (
    Calibration,
    Line,
    Streamed,
    chunked,
    line_of_chunks,
    line_through,
    timed_rows,
)
from fluxtrain.plan.facts import GroupFacts, ModelFacts, RowFacts
from fluxtrain.plan.footprint import Layout
from fluxtrain.plan.rates import Rates, rates_from
from fluxtrain.plan.simulation import step_time
from fluxtrain.train.placing.prediction import WARMING_STEPS, compared, steady_step_s

seconds = st.floats(1e-6, 1e3)
TRIED = Calibration(
    forward=Line(base=0.001, slope=0.002),
    backward=Line(base=0.003, slope=0.006),
    outside_forward=Line(base=0.01, slope=0.005),
    outside_backward=Line(base=0.002, slope=0.001),
    activation_bytes=10_000,
    host_block_s=0.0005,
    device_update_s=1e-9,
    adamw_per_s=1e9,
    rows=(1, 4),
    measured_at_s=0.0,
    measuring_s=1.0,
)
BLOCK = 1_000_000
FACTS = ModelFacts(
    groups=(
        GroupFacts(name="embedding", kind="edge", weight_bytes=2 * BLOCK, trained_bf16=BLOCK),
        *(
            GroupFacts(name=f"{i}", kind="block", weight_bytes=2 * BLOCK, trained_bf16=BLOCK)
            for i in range(10)
        ),
    ),
    row=RowFacts(
        hidden=64, vocabulary=100, sequence_length=16, dtype_bytes=2, activation_bytes=1000
    ),
)
PER_S = {"adamw": 5e9, "h2d_pinned": 1e12, "d2h_pinned": 1e12, "host_copy": 1e12}


@given(st.integers(1, 8), st.integers(1, 8), seconds, seconds, st.integers(1, 64))
def test_a_line_meets_the_larger_trial_and_never_goes_below_zero(
    few: int, more: int, first: float, second: float, rows: int
) -> None:
    line = line_through((few, first), (few + more, second))
    assert line.at(few + more) == pytest.approx(second)
    assert line.base >= -1e-9 * second
    assert line.slope >= 0
    assert line.at(rows + 1) >= line.at(rows) >= 0
    assert line.at(0) == 0


def test_two_trials_on_a_line_give_that_line() -> None:
    line = line_through((1, 0.5), (4, 1.1))
    assert (line.base, line.slope) == pytest.approx((0.3, 0.2))
    assert line_through((2, 1.0), (2, 1.0)) == Line(base=0.0, slope=0.5)


def test_the_same_rows_at_once_and_in_chunks_tell_what_a_chunk_costs() -> None:
    line = line_of_chunks(16, 4.0, 4, 4.6)
    assert (line.base, line.slope) == pytest.approx((0.2, 3.8 / 16))
    assert chunked(line, 16, 4) == pytest.approx(4.6)
    assert line_of_chunks(16, 4.0, 4, 3.9) == Line(base=0.0, slope=0.25)  # noise
    assert line_of_chunks(1, 4.0, 1, 4.0) == Line(base=0.0, slope=4.0)


@given(st.integers(1, 64), st.integers(1, 64), st.floats(0, 1), st.floats(0, 1))
def test_larger_chunks_never_take_longer(batch: int, chunk: int, base: float, slope: float) -> None:
    line = Line(base=base, slope=slope)
    assert chunked(line, batch, chunk + 1) <= chunked(line, batch, chunk) + 1e-9
    chunks = -(-batch // min(chunk, batch))
    assert chunked(line, batch, chunk) == pytest.approx(chunks * base + batch * slope)


@given(st.integers(1, 100_000), st.none() | st.integers(1, 100))
def test_trials_have_two_sizes_of_which_the_larger_is_what_a_run_takes(
    length: int, batch: int | None
) -> None:
    few, many = timed_rows(length, batch, 4096)
    assert 1 <= few < many
    assert many == 2 or many * length <= 4096
    assert batch is None or many <= max(2, batch)


def test_a_tried_block_replaces_the_constants_of_its_class() -> None:
    """By hand: ten blocks, eight rows in two chunks; once begun, nothing waits for the bus."""
    rates = rates_from(PER_S, has_gpu=True, calibration=TRIED)
    assert isinstance(rates, Rates)
    layout = Layout(offload="weights", batch_rows=8, chunk_rows=4)
    found = step_time(FACTS, layout, rates)
    assert found.parts_s["forward"] == pytest.approx(10 * 2 * (0.001 + 4 * 0.002))
    assert found.parts_s["head"] == pytest.approx(0.01 + 8 * 0.005)
    assert found.parts_s["backward"] == pytest.approx(
        10 * 2 * (0.003 + 4 * 0.006) + 0.002 + 8 * 0.001
    )
    assert found.parts_s["host_update"] == pytest.approx(
        11 * BLOCK / 1e9
    )  # its own rate, not the probe's
    assert found.parts_s["queueing"] == pytest.approx(10 * 2 * 0.0005)
    start_s = 2 * BLOCK / 1e9 + 2 * BLOCK / 1e12  # embedding and first block are updated before it
    computed_s = found.parts_s["forward"] + found.parts_s["head"] + found.parts_s["backward"]
    assert found.step_s == pytest.approx(start_s + computed_s, rel=0.01)


def test_updates_on_the_device_take_time_and_spare_the_hosts() -> None:
    rates = rates_from(PER_S, has_gpu=True, calibration=TRIED)
    assert isinstance(rates, Rates)
    found = step_time(FACTS, Layout(offload="none", batch_rows=8, chunk_rows=4), rates)
    assert found.parts_s["host_update"] == 0
    assert found.parts_s["device_update"] == pytest.approx(11 * BLOCK * 1e-9)
    assert found.step_s == pytest.approx(
        found.parts_s["forward"]
        + found.parts_s["head"]
        + found.parts_s["backward"]
        + found.parts_s["device_update"]
    )


def test_no_step_is_shorter_than_the_host_needs_to_queue_it() -> None:
    rates = rates_from(PER_S, has_gpu=True, calibration=replace(TRIED, host_block_s=0.1))
    assert isinstance(rates, Rates)
    found = step_time(FACTS, Layout(offload="none", batch_rows=8, chunk_rows=4), rates)
    assert found.step_s == pytest.approx(10 * 2 * 0.1)
    assert found.binds == "the processor that drives the GPU"


def test_updates_beside_a_backward_pass_have_a_rate_of_their_own() -> None:
    tried = replace(TRIED, adamw_beside_per_s=0.5e9)
    rates = rates_from(PER_S, has_gpu=True, calibration=tried)
    assert isinstance(rates, Rates)
    layout = Layout(offload="weights", batch_rows=8, chunk_rows=4)
    in_backward = step_time(FACTS, replace(layout, optimizer_in_backward=True), rates, clips=False)
    clipped = step_time(FACTS, layout, rates)
    assert in_backward.parts_s["host_update"] == pytest.approx(2 * clipped.parts_s["host_update"])
    narrow = FACTS.with_states("8bit")
    narrow = replace(narrow, groups=tuple(replace(g, narrow=g.trained) for g in narrow.groups))
    tried = replace(tried, adamw_8bit_per_s=1e9, adamw_8bit_beside_per_s=0.25e9)
    rates = rates_from(PER_S, has_gpu=True, calibration=tried)
    assert isinstance(rates, Rates)
    in_backward = step_time(narrow, replace(layout, optimizer_in_backward=True), rates, clips=False)
    assert in_backward.parts_s["host_update"] == pytest.approx(11 * BLOCK / 0.25e9)


def test_a_calibration_needs_no_matmul_rate() -> None:
    assert isinstance(rates_from(PER_S, has_gpu=True), str)
    assert isinstance(rates_from(PER_S, has_gpu=False, calibration=TRIED), Rates)
    without_bus = rates_from({"adamw": 1e9}, has_gpu=True, calibration=TRIED)
    assert without_bus == "not measured on this machine: h2d_pinned, d2h_pinned"


def test_the_first_steps_do_not_count() -> None:
    assert steady_step_s([9.0] * WARMING_STEPS) is None
    assert steady_step_s([9.0] * WARMING_STEPS + [1.0, 3.0, 2.0]) == 2.0
    assert steady_step_s([9.0] * WARMING_STEPS + [1.0, 2.0]) == 1.5


def test_an_error_is_a_share_of_what_was_measured() -> None:
    rows = compared(
        {"step_s": 1.1, "host_peak_bytes": 90.0, "device_peak_bytes": 5.0},
        {"step_s": 1.0, "host_peak_bytes": 100.0, "device_peak_bytes": None},
    )
    assert [(row.quantity, row.error) for row in rows] == [
        ("device_peak_bytes", None),
        ("host_peak_bytes", pytest.approx(-0.1)),
        ("step_s", pytest.approx(0.1)),
    ]


def test_what_streaming_cost_a_small_model_beside_its_bytes_counts_for_every_host_group() -> None:
    streamed = Streamed(longer_s=0.5, updated_bytes=26_000_000, copied_bytes=5_000_000, groups=4)
    per_s = {**PER_S, "host_copy": 1e8}  # of the half second AdamW took 1 ms, copies took 50
    without = rates_from(per_s, has_gpu=False, calibration=replace(TRIED, adamw_per_s=1e9))
    tried = replace(TRIED, adamw_per_s=1e9, streamed=streamed)
    rates = rates_from(per_s, has_gpu=False, calibration=tried)
    assert isinstance(rates, Rates)
    assert isinstance(without, Rates)
    layout = Layout(offload="weights", batch_rows=4, chunk_rows=4)
    found, base = step_time(FACTS, layout, rates), step_time(FACTS, layout, without)
    assert found.parts_s["beside_bytes"] == pytest.approx(
        len(FACTS.groups) * (0.5 - 0.001 - 0.05) / 4
    )
    assert found.step_s == pytest.approx(base.step_s + found.parts_s["beside_bytes"])
    resident = step_time(FACTS, replace(layout, offload="none"), rates)
    assert resident.parts_s["beside_bytes"] == 0
    assert step_time(FACTS, layout, replace(rates, has_gpu=True)).parts_s["beside_bytes"] == 0


@given(st.floats(-1, 1), st.floats(1e3, 1e12), st.floats(1e3, 1e12))
def test_noise_never_makes_streaming_cheaper_than_its_bytes(
    longer: float, update: float, copies: float
) -> None:
    streamed = Streamed(longer_s=longer, updated_bytes=1000, copied_bytes=1000, groups=3)
    assert 0 <= streamed.beside_bytes_s(update, copies) <= max(0.0, longer) / 3
