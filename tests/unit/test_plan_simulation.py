"""A step is simulated: its bounds, and what slots, updates, queueing and passes do to it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fluxtrain.plan.calibration import Calibration, HostTimes, Line
from fluxtrain.plan.facts import OFFLOADS, GroupFacts, ModelFacts, RowFacts
from fluxtrain.plan.footprint import Layout
from fluxtrain.plan.rates import Rates
from fluxtrain.plan.simulation import StepTime, step_time
from fluxtrain.units import GIB
from tests.unit.test_plan_properties import models

layouts = st.builds(
    Layout,
    offload=st.sampled_from(OFFLOADS),
    device_groups=st.integers(0, 14),
    device_first=st.sampled_from(["embedding", "blocks"]),
    resident_blocks=st.integers(0, 10),
    blocks_without_recompute=st.integers(0, 10),
    activations=st.sampled_from(["device", "host"]),
    activations_on_device=st.integers(0, 10),
    batch_rows=st.integers(1, 8),
    chunk_rows=st.integers(1, 8),
    embedding=st.sampled_from(["whole", "rows"]),
    deferred_moments=st.booleans(),
)
per_s = st.floats(6, 12).map(lambda power: 10**power)
lines = st.builds(Line, base=st.floats(0, 0.1), slope=st.floats(0, 0.1))
HOST_TIMES = {
    name: lines if str(field.type) == "Line" else st.floats(0, 0.1)
    for name, field in HostTimes.__dataclass_fields__.items()
}
calibrations = st.builds(
    Calibration,
    forward=lines,
    backward=lines,
    outside_forward=lines,
    outside_backward=lines,
    activation_bytes=st.integers(1, GIB),
    kept_backward=st.none() | lines,
    kept_bytes=st.integers(1, 1 << 26),
    host_block_s=st.floats(0, 0.1),
    host_forward_s=st.floats(0, 0.1),
    host=st.none() | st.builds(HostTimes, **HOST_TIMES),
    device_update_s=st.floats(0, 1e-9),
    rows=st.just((1, 4)),
    measured_at_s=st.just(0.0),
    measuring_s=st.just(1.0),
)
gpus = st.builds(
    Rates,
    has_gpu=st.just(True),
    matmul_per_s=st.just(1e14),
    adamw_per_s=per_s,
    adamw_weights_per_s=st.none() | per_s,
    adamw_moments_per_s=st.none() | per_s,
    adamw_beside_per_s=st.none() | per_s,
    h2d_bytes_per_s=per_s,
    d2h_bytes_per_s=per_s,
    calibration=st.none() | calibrations,
)
cores = st.builds(
    Rates,
    has_gpu=st.just(False),
    matmul_per_s=st.just(1e11),
    adamw_per_s=per_s,
    copy_bytes_per_s=per_s,
)


def with_table(facts: ModelFacts, table_rows: int) -> ModelFacts:
    """Rows of its first group can be looked up where that is an edge."""
    first, *others = facts.groups
    rows = table_rows if first.kind == "edge" else 0
    return replace(facts, groups=(replace(first, table_rows=rows), *others))


@settings(max_examples=60, deadline=None)
@given(models(), st.integers(0, 4096), layouts, gpus | cores, st.booleans(), st.integers(1, 3))
def test_no_step_is_shorter_than_what_any_resource_does_in_it(
    facts: ModelFacts, rows: int, layout: Layout, rates: Rates, clips: bool, passes: int
) -> None:
    layout = replace(layout, passes=passes, optimizer_in_backward=not clips)
    found = step_time(with_table(facts, rows), layout, rates, clips=clips, passes=passes)
    assert found.step_s >= max(found.busy_s.values()) * (1 - 1e-3)
    assert found.step_s <= sum(found.parts_s.values()) * (1 + 1e-3) or rates.has_gpu
    assert all(seconds >= 0 for seconds in found.parts_s.values())


LAYERS, BLOCK = 8, 100_000_000
STREAMED = Layout(offload="weights", batch_rows=8, chunk_rows=8)


def model(edge: int = 0) -> ModelFacts:
    """Eight blocks, behind an embedding if `edge` says how large it is."""

    def group(name: str, size: int, kind: Any = "block") -> GroupFacts:
        return GroupFacts(name=name, kind=kind, weight_bytes=2 * size, trained_bf16=size)

    row = RowFacts(hidden=64, vocabulary=128, sequence_length=8, dtype_bytes=2, activation_bytes=1)
    blocks = [group(f"layers.{at}", BLOCK) for at in range(LAYERS)]
    first = [group("embed", edge, "edge")] if edge else []
    return ModelFacts(groups=(*first, *blocks), row=row)


def timed(
    layout: Layout = STREAMED,
    passes: int = 1,
    edge: int = 0,
    facts: dict[str, Any] | None = None,
    **changes: Any,
) -> StepTime:
    """A step on a machine whose block computes 40 ms forward and 120 back, copies 4 ms."""
    tried: dict[str, Any] = {
        "forward": Line(base=0.0, slope=0.005), "backward": Line(base=0.0, slope=0.015),
        "outside_forward": Line(base=0.0, slope=0.005),
        "outside_backward": Line(base=0.0, slope=0.0), "activation_bytes": 1,
        "rows": (1, 2), "measured_at_s": 0.0, "measuring_s": 1.0,
    }  # fmt: skip
    tried |= {name: changes.pop(name) for name in (*tried, "host") if name in changes}
    rates = Rates(
        has_gpu=True, matmul_per_s=1e12, calibration=Calibration(**tried),
        **{"adamw_per_s": 1e11, "h2d_bytes_per_s": 50e9, "d2h_bytes_per_s": 50e9, **changes},
    )  # fmt: skip
    clips = not layout.optimizer_in_backward
    of = replace(model(edge), **(facts or {}))
    return step_time(of, layout, rates, clips=clips, passes=passes)


COMPUTING_S = LAYERS * 0.16 + 0.04


def test_the_next_forward_waits_for_the_first_update_alone_where_it_computes_longer() -> None:
    """AdamW of all takes 0.2 s, the forward 0.32 s: the rest of the updates is hidden."""
    first_s = 0.2 / LAYERS + 0.004
    assert timed(adamw_per_s=4e9).step_s == pytest.approx(COMPUTING_S + first_s, rel=0.01)


def test_a_forward_that_is_faster_than_the_updates_ends_behind_the_last() -> None:
    """AdamW takes 0.8 s, then the last block is copied (5 ms at most) and computed with."""
    assert timed(adamw_per_s=1e9).step_s == pytest.approx(0.8 + 0.044 + 0.04 + 0.96, rel=0.01)


def test_deferred_moments_run_under_the_first_of_several_backward_passes_alone() -> None:
    """Moments of 1.1 s in all: forward, loss and backward of one pass hide what another could."""
    late = replace(STREAMED, deferred_moments=True)
    one, two = (timed(late, passes, adamw_per_s=0.5e9) for passes in (1, 2))
    assert one.step_s > COMPUTING_S + 0.5
    assert two.step_s - one.step_s == pytest.approx(COMPUTING_S, rel=0.05)


def test_updates_in_backward_leave_the_last_gradients_to_wait_for() -> None:
    """Each block's update of 40 ms is hidden behind the next block's 120 ms of backward."""
    layout = replace(STREAMED, optimizer_in_backward=True)
    found = timed(layout, adamw_per_s=2.5e9)
    assert COMPUTING_S < found.step_s < COMPUTING_S + 0.06


def test_few_buffers_hold_a_backward_up_whose_updates_do_not_keep_up() -> None:
    layout = replace(STREAMED, optimizer_in_backward=True)
    slow = timed(layout, adamw_per_s=0.5e9)  # 0.2 s a block, 1.6 s in all
    assert 1.6 < slow.step_s < 1.6 + COMPUTING_S / 2
    assert slow.binds == "AdamW on the host"


def test_an_embedding_on_the_host_is_copied_before_the_forward_begins() -> None:
    small, large = (timed(edge=size).step_s for size in (1, 500_000_000))
    assert large - small >= 2 * 500_000_000 / 50e9  # its gradient down, its weights up


def test_a_bus_that_is_slower_than_the_blocks_binds_and_two_slots_are_enough() -> None:
    slow: dict[str, Any] = {"h2d_bytes_per_s": 1e9, "d2h_bytes_per_s": 50e9}
    two, five = (timed(replace(STREAMED, slots=slots), **slow) for slots in (2, 5))
    assert two.binds == "copies of weights to the GPU"
    assert five.step_s == pytest.approx(two.step_s, rel=0.15)
    assert five.step_s <= two.step_s * (1 + 1e-9)


def test_accumulated_passes_cost_the_copies_of_their_sums() -> None:
    thin: dict[str, Any] = {"h2d_bytes_per_s": 2e9, "d2h_bytes_per_s": 2e9}
    one, three = (timed(passes=passes, **thin) for passes in (1, 3))
    assert three.parts_s["download"] == pytest.approx((1 + 2 + 2) * one.parts_s["download"])
    assert three.parts_s["host_update"] == one.parts_s["host_update"]
    assert three.work.tokens == 3 * one.work.tokens


def host(**changes: Line) -> HostTimes:
    lines: dict[str, Any] = dict.fromkeys(
        ("forward", "backward", "forward_beside", "backward_beside"), Line(base=0.0, slope=0.001)
    )
    zeros = ("offload_forward_s", "offload_backward_s", "outside_s", "host_group_update_s",
             "device_update_s")  # fmt: skip
    return HostTimes(**{**dict.fromkeys(zeros, 0.0), **lines, **changes})


def test_a_step_that_the_host_queues_slowly_takes_as_long_as_the_host() -> None:
    slow = host(forward=Line(base=0.1, slope=0.1), backward=Line(base=0.1, slope=0.2))
    layout = replace(STREAMED, offload="none", chunk_rows=4)  # two chunks
    found = timed(layout, host=slow)
    assert found.step_s == pytest.approx(LAYERS * (0.1 + 0.2 + 0.1 + 0.4), rel=0.02)
    assert found.binds == "the processor that drives the GPU"
    assert timed(layout, host=host()).step_s == pytest.approx(COMPUTING_S, rel=0.01)


def test_while_adamw_runs_the_host_queues_more_slowly() -> None:
    slower = host(forward_beside=Line(base=0.0, slope=0.1))
    assert timed(adamw_per_s=1e9, host=slower).step_s > timed(adamw_per_s=1e9, host=host()).step_s


def test_gradients_of_other_processes_are_added_beside_backward_and_bind_where_it_is_faster() -> (
    None
):
    """Of two processes 4 bytes a parameter of each block cross between the cards each way."""
    two = {"processes": 2, "parts": 2}
    block_s, slow_s = 4 * BLOCK / 50e9, 4 * BLOCK / 0.5e9  # a block's backward takes 0.12
    near, fast = timed(facts=two), timed(facts=two, peer_bytes_per_s=50e9)
    slow = timed(facts=two, peer_bytes_per_s=0.5e9)
    assert near.step_s < timed().step_s  # each downloads and updates its half
    assert fast.step_s == pytest.approx(near.step_s + block_s)
    bound_s = near.step_s + LAYERS * slow_s - (LAYERS - 1) * 0.12
    assert slow.step_s == pytest.approx(bound_s, rel=5e-3)
    device = replace(STREAMED, offload="none")
    assert timed(device, facts=two, peer_bytes_per_s=0.5e9).step_s > timed(device).step_s + slow_s


def test_gradients_that_the_host_adds_cross_the_bus_in_fp32() -> None:
    two = {"processes": 2, "parts": 2, "adds_on_host": True}
    on_host = timed(facts=two, peer_bytes_per_s=0.5e9)
    added_s = BLOCK * (2 * 4 + 2) / 2 / (26 * 1e11)
    more_s = on_host.step_s - timed(facts=two | {"adds_on_host": False}).step_s
    assert more_s == pytest.approx(BLOCK * (4 - 2 / 2) / 50e9 + added_s)
