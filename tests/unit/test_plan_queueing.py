"""What the host of a GPU needs to queue a step, by hand; and what the step then takes."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fluxtrain.plan.cost.calibration import HostTimes, Line
from fluxtrain.plan.cost.queueing import Queueing, queueing_of
from fluxtrain.plan.cost.rates import Rates, rates_from
from fluxtrain.plan.cost.step import cost
from fluxtrain.plan.footprint import Layout
from tests.unit.test_plan_calibration import BLOCK, FACTS, PER_S, TRIED


def a_chunk(seconds: float) -> Line:
    return Line(base=0.0, slope=seconds)


HOST = HostTimes(
    forward=a_chunk(0.002), backward=a_chunk(0.004),
    forward_beside=a_chunk(0.003), backward_beside=a_chunk(0.006),
    offload_forward_s=0.0001, offload_backward_s=0.0003, outside_s=0.01,
    host_group_update_s=0.0005, device_update_s=0.001,
)  # fmt: skip
AT_HOME = Layout(offload="weights", batch_rows=8, chunk_rows=4)
ON_DEVICE = replace(AT_HOME, offload="none")


def rates_of(host: HostTimes | None, **changes: float) -> Rates:
    found = rates_from(PER_S, has_gpu=True, calibration=replace(TRIED, host=host, **changes))
    assert isinstance(found, Rates)
    return found


def test_blocks_beside_an_update_are_queued_slower() -> None:
    queueing = Queueing(
        blocks=10, forward_s=0.002, forward_beside_s=0.004, backward_s=0.003,
        backward_beside_s=0.006, lead_s=0.01,
    )  # fmt: skip
    assert queueing.forward(0.001, 0.0) == pytest.approx(10 * 0.002)
    assert queueing.forward(0.001, 0.012) == pytest.approx(3 * 0.004 + 7 * 0.002)
    assert queueing.forward(0.001, 9.0) == pytest.approx(10 * 0.004)
    assert queueing.forward(0.005, 9.0) == pytest.approx(10 * 0.005)  # the GPU is slower
    assert queueing.backward(0.0) == pytest.approx(10 * 0.003 - 0.01)
    assert queueing.backward(0.03) == pytest.approx(5 * 0.006 + 5 * 0.003 - 0.01)


def test_a_layout_is_queued_by_hand() -> None:
    """Ten blocks in two chunks, an embedding; the head gives 40 ms."""
    found = queueing_of(FACTS, AT_HOME, rates_of(HOST), 0.05, clips=True)
    assert (found.forward_s, found.backward_s) == pytest.approx((0.004, 0.008))
    assert found.lead_s == pytest.approx(0.04)
    assert found.optimizer_s == pytest.approx(11 * 0.0005)
    assert found.step(1) == pytest.approx(10 * 0.012 + 0.01 + 11 * 0.0005)
    on_device = queueing_of(FACTS, ON_DEVICE, rates_of(HOST), 0.05, clips=True)
    assert on_device.optimizer_s == pytest.approx(11 * 0.001)
    in_backward = queueing_of(FACTS, ON_DEVICE, rates_of(HOST), 0.05, clips=False)
    assert in_backward.optimizer_s == 0
    assert in_backward.backward_beside_s == pytest.approx(2 * 0.006 + 11 * 0.001 / 10)


def test_what_is_done_once_a_block_counts_once_however_many_chunks_there_are() -> None:
    woken = replace(HOST, forward_beside=Line(base=0.005, slope=0.002))
    for rows, chunks in ((8, 1), (4, 2), (1, 8)):
        layout = replace(AT_HOME, chunk_rows=rows)
        found = queueing_of(FACTS, layout, rates_of(woken), 0.05, clips=True)
        assert found.forward_beside_s == pytest.approx(0.005 + chunks * 0.002)
        assert found.backward_beside_s == pytest.approx(chunks * 0.006)


def test_boundaries_that_go_home_are_queued_too() -> None:
    here = queueing_of(FACTS, AT_HOME, rates_of(HOST), 0.05, clips=True)
    offloaded = replace(AT_HOME, activations="host")
    there = queueing_of(FACTS, offloaded, rates_of(HOST), 0.05, clips=True)
    assert there.forward_s - here.forward_s == pytest.approx(0.0001)
    assert there.backward_beside_s - here.backward_beside_s == pytest.approx(0.0003)
    kept = replace(
        offloaded, resident_blocks=4, blocks_without_recompute=4
    )  # of ten, which have nothing to send
    some = queueing_of(FACTS, kept, rates_of(HOST), 0.05, clips=True)
    assert some.backward_s - here.backward_s == pytest.approx(0.6 * 0.0003)


def test_a_step_that_the_host_binds_takes_as_long_as_the_host() -> None:
    slow = replace(
        HOST, forward=a_chunk(0.1), backward=a_chunk(0.2), forward_beside=a_chunk(0.1),
        outside_s=0.0,
    )  # fmt: skip
    found = cost(FACTS, ON_DEVICE, rates_of(slow))
    assert found.step_s == pytest.approx(10 * 2 * 0.3 + 11 * 0.001)
    assert found.binds == "the processor that drives the GPU"


def test_behind_a_backward_pass_that_the_host_binds_the_gpu_waits_for_its_last_work() -> None:
    """AdamW at home, so that the host is ahead under the head alone."""
    slow = replace(HOST, backward=a_chunk(0.1), outside_s=0.0)
    quick, late = rates_of(slow, adamw_per_s=1e15), replace(slow, host_group_update_s=0.1)
    found = cost(FACTS, AT_HOME, quick)
    behind = cost(FACTS, AT_HOME, rates_of(late, adamw_per_s=1e15))
    assert found.backward_phase_s == pytest.approx(10 * 2 * 0.1 - found.head_s)
    assert behind.step_s - found.step_s == pytest.approx(11 * (0.1 - 0.0005))


def test_of_a_gpu_that_is_slower_the_hosts_last_work_takes_nothing() -> None:
    quick = scaled(HOST, 0.0)
    last = replace(quick, host_group_update_s=0.001)
    rates = {host: rates_of(host) for host in (quick, last)}
    assert cost(FACTS, AT_HOME, rates[last]).step_s == cost(FACTS, AT_HOME, rates[quick]).step_s


def test_a_forward_beside_a_slow_update_is_no_faster_than_its_host() -> None:
    beside = replace(HOST, forward_beside=a_chunk(1.0))
    layout = replace(AT_HOME, embedding="whole")
    rates = rates_of(beside, adamw_per_s=BLOCK / 0.5)  # a block's update takes half a second
    found = cost(FACTS, layout, rates)
    assert found.forward_phase_s >= 11 * 0.5
    assert found.forward_phase_s >= found.host_update_s


times = st.floats(0, 0.1)
hosts = st.builds(
    HostTimes,
    **{
        name: st.builds(Line, base=times, slope=times) if isinstance(value, Line) else times
        for name, value in vars(HOST).items()
    },
)


def scaled(host: HostTimes, factor: float) -> HostTimes:
    return HostTimes(**{
        name: value.times(factor) if isinstance(value, Line) else factor * value
        for name, value in vars(host).items()
    })  # fmt: skip


@given(hosts, st.booleans())
def test_a_slower_host_never_makes_a_step_faster(host: HostTimes, clips: bool) -> None:
    slower = replace(scaled(host, 2.0), outside_s=host.outside_s)
    for layout in (AT_HOME, ON_DEVICE):
        one = cost(FACTS, layout, rates_of(host), clips=clips).step_s
        other = cost(FACTS, layout, rates_of(slower), clips=clips).step_s
        assert other >= one - 1e-12
