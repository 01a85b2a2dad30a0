"""Advice follows from measured numbers, promises a number, and never what is not possible."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fluxtrain.plan.calibration import Calibration, Line
from fluxtrain.train.live.advice import (
    LEAST_GAIN,
    MOST_ADVICE,
    Advice,
    RunFacts,
    advise,
    promising,
)
from fluxtrain.train.live.edit import MemoryInUse, settings_after
from fluxtrain.train.live.settings import Change
from fluxtrain.units import GIB, MIB
from tests.unit.live_ground import BLOCKS, RATES, facts, ground, steps


def by_id(given_facts: RunFacts) -> dict[str, Advice]:
    return {advice.id: advice for advice in promising(given_facts)}


def waiting(**stalls: float) -> Any:
    return steps(stalls_s=stalls)


def test_a_run_that_waits_for_nothing_gets_no_advice_without_rates() -> None:
    assert advise(facts(rates=None)) == ()


def test_room_on_the_device_and_waiting_for_weights_gives_more_resident_blocks() -> None:
    found = by_id(facts(steps=waiting(weights=0.3), rates=None))["resident"]
    assert found.change == Change(name="resident_blocks", value=BLOCKS)
    assert found.gain == pytest.approx(0.3 * 8 / 16)  # trained: half of the copies fall away
    assert "30% of the last 20 steps" in found.because
    frozen = by_id(facts(ground(trained=False), steps=waiting(weights=0.3), rates=None))
    assert frozen["resident"].gain == pytest.approx(0.3)


def test_as_many_blocks_are_advised_as_the_room_holds() -> None:
    on = ground(budget_bytes=2 * GIB)
    use = MemoryInUse(device_peak_bytes=(int(2 * GIB * 0.9) - 250 * MIB,))
    found = by_id(facts(on, steps=waiting(weights=0.5), memory=use, rates=None))["resident"]
    assert found.change == Change(name="resident_blocks", value=2)
    full = replace(use, device_peak_bytes=(int(2 * GIB * 0.9) - 50 * MIB,))
    assert "resident" not in by_id(facts(on, steps=waiting(weights=0.5), memory=full, rates=None))


def test_copies_that_fit_beside_the_computing_are_started_sooner() -> None:
    found = by_id(facts(steps=waiting(weights=0.2)))["prefetch"]
    assert found.change == Change(name="prefetch", value=4)
    assert found.gain == pytest.approx(0.1)
    bound = replace(RATES, h2d_bytes_per_s=1e9)  # a slow bus: copies take longer than computing
    assert "prefetch" not in by_id(facts(steps=waiting(weights=0.2), rates=bound))


def test_a_larger_chunk_is_advised_where_it_fits_and_never_one_that_ran_out() -> None:
    found = by_id(facts())["chunk"]
    assert found.change == Change(name="chunk_rows", value=8)
    assert found.gain > LEAST_GAIN
    assert "rounding" in found.because
    again = by_id(facts(failed_chunk_rows=8))["chunk"]
    assert again.change == Change(name="chunk_rows", value=4)
    assert "chunk" not in by_id(facts(failed_chunk_rows=4))
    assert "chunk" not in by_id(facts(rates=None))


def test_spare_memory_takes_whole_parts_where_the_cost_model_says_that_this_is_faster() -> None:
    slow = replace(RATES, adamw_per_s=4e8)  # the host's update is what the step waits for
    wide = ground(budget_bytes=12 * GIB)
    run = facts(wide, steps=waiting(update=0.4, weights=0.1), rates=slow)
    found = by_id(run)["device"]
    assert found.change == Change(name="device_groups", value=BLOCKS + 2)
    assert found.gain == pytest.approx(0.5, rel=0.05)  # never more than is waited for
    told = {advice.id for advice in advise(run)}
    assert "device" in told and "resident" not in told  # the same memory is promised once
    assert "device" not in by_id(replace(run, run=ground(budget_bytes=None)))
    tight = ground(budget_bytes=int(ground().need(ground().planned).device_bytes / 0.9) + 16)
    assert "device" not in by_id(replace(run, run=tight))


def test_a_cost_model_that_is_far_from_the_measured_step_is_not_believed() -> None:
    run = facts()
    assert "chunk" in by_id(run)
    for seconds in (run.steps.step_s * 4, run.steps.step_s / 4):
        off = replace(run.steps, step_s=seconds)
        assert "chunk" not in by_id(replace(run, steps=off))


def test_waiting_for_the_update_names_the_price_of_clipping() -> None:
    found = by_id(facts(steps=waiting(update=0.25), rates=None))["backward"]
    assert (found.change, found.setting) == (None, "train.max_grad_norm=null")
    assert found.gain == pytest.approx(0.25)
    for other in ({"clips": False}, {"passes": 2}):
        assert "backward" not in by_id(facts(steps=waiting(update=0.25), rates=None, **other))


def test_several_passes_a_step_become_fewer_with_more_rows() -> None:
    found = by_id(facts(steps=waiting(weights=0.4), passes=4, rates=None))["rows"]
    assert found.setting == "train.batch_rows=16 train.accumulation=2"
    assert found.gain == pytest.approx(0.2)
    single = by_id(facts(steps=waiting(weights=0.4), rates=None))["rows"]
    assert single.setting == "train.batch_rows=16"
    assert single.gain == pytest.approx(1 - 2 * 0.6 / 2)  # the wait hides behind twice the work
    tight = ground(budget_bytes=ground().need(ground().planned).device_bytes)
    assert "rows" not in by_id(facts(tight, steps=waiting(weights=0.4), rates=None))


@pytest.mark.parametrize(("left_bytes", "offered"), [(None, True), (GIB, True), (MIB, False)])
def test_more_rows_are_not_advised_where_their_boundaries_do_not_fit_the_host(
    left_bytes: int | None, offered: bool
) -> None:
    use = MemoryInUse(host_available_bytes=left_bytes)
    found = by_id(facts(ground(activations="host"), steps=waiting(weights=0.4), memory=use))
    assert ("rows" in found) is offered


def test_data_memory_and_repeated_steps_each_name_their_share() -> None:
    found = by_id(
        facts(
            ground(budget_bytes=None),
            rates=None,
            steps=steps(data_s=0.1),
            pressure_share=0.3,
            failed_chunk_rows=4,
            redone_share=0.01,
        )
    )
    assert {name: advice.gain for name, advice in found.items()} == {
        "data": 0.1, "memory": 0.3, "redone": 0.01,
    }  # fmt: skip
    assert "train.batch_rows=4 train.accumulation=2" in found["memory"].setting
    assert found["redone"].setting == "placement.chunk_rows=2"
    on_gpu = by_id(facts(rates=None, pressure_share=0.3))["memory"]
    assert "batch_rows" not in on_gpu.setting  # a GPU's rows take no host memory


def test_what_was_tried_and_gave_too_little_is_not_said_again() -> None:
    tried = Change(name="resident_blocks", value=BLOCKS)
    run = facts(steps=waiting(weights=0.3), rates=None)
    assert "resident" in by_id(run)
    assert "resident" not in by_id(replace(run, disproved=frozenset({tried})))


@given(
    weights=st.floats(0, 0.4), update=st.floats(0, 0.3), gradients=st.floats(0, 0.2),
    data_s=st.floats(0, 0.1), budget=st.integers(GIB, 6 * GIB), resident=st.integers(0, BLOCKS),
    passes=st.integers(1, 4), clips=st.booleans(), rates=st.sampled_from([None, RATES]),
    pressure=st.none() | st.floats(0, 1),
)  # fmt: skip
def test_every_advice_has_a_number_and_live_ones_are_accepted(
    weights: float, update: float, gradients: float, data_s: float, budget: int, resident: int,
    passes: int, clips: bool, rates: Any, pressure: float | None,
) -> None:  # fmt: skip
    stalls = {"weights": weights, "update": update, "gradients": gradients}
    run = facts(
        ground(budget_bytes=budget, resident_blocks=resident),
        steps=steps(stalls_s=stalls, data_s=data_s),
        passes=passes, clips=clips, rates=rates, pressure_share=pressure,
    )  # fmt: skip
    found = advise(run)
    assert len(found) <= MOST_ADVICE
    assert [a.gain for a in found] == sorted((a.gain for a in found), reverse=True)
    for advice in found:
        assert LEAST_GAIN <= advice.gain <= 1
        assert advice.because and advice.how
        if advice.change is not None:
            settings_after(run.run, run.settings, advice.change, run.memory)


def test_a_gpu_that_gets_its_work_late_is_given_larger_operations() -> None:
    """The host takes 100 ms a block and chunk, the GPU computes a row of it in 3 ms."""
    tried = Calibration(
        forward=Line(base=0.0, slope=1e-3), backward=Line(base=0.0, slope=2e-3),
        outside_forward=Line(base=0.0, slope=1e-3), outside_backward=Line(base=0.0, slope=1e-3),
        activation_bytes=20 * MIB, host_block_s=0.1, host_forward_s=0.03, rows=(1, 8),
        measured_at_s=0.0, measuring_s=1.0,
    )  # fmt: skip
    rates = replace(RATES, calibration=tried)
    late = steps(queued_s=0.6)
    run = facts(ground(chunk_rows=8), steps=late, rates=rates)
    found = by_id(run)["queue"]
    assert found.setting == "train.batch_rows=16" and found.gain == pytest.approx(0.5, rel=0.05)
    assert "60% of the last 20 steps" in found.because and "larger batch" in found.because
    assert "queued late by the host" in found.because
    halved = by_id(replace(run, passes=2))["queue"]
    assert halved.setting == "train.batch_rows=16 train.accumulation=1"
    assert "larger batch" not in halved.because
    four_chunks = replace(run, run=ground(), settings=ground().planned)
    chunked = by_id(replace(four_chunks, steps=steps(step_s=3.2, queued_s=2.0)))
    assert "queue" not in chunked and "queued late" in chunked["chunk"].because
    assert "queue" not in by_id(replace(run, steps=steps(queued_s=0.05)))
    assert "queue" not in by_id(replace(run, rates=None))
    full = ground(chunk_rows=8, budget_bytes=GIB)
    assert "queue" not in by_id(replace(run, run=full))
