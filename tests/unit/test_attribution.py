"""Where the seconds of a step went: hand-made lanes whose answer is known."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fluxtrain.events.trace.attribution import Attribution, attribute, summary_lines
from fluxtrain.events.trace.lanes import BUSY_LANES, LANES, Interval, StepLanes


def step_of(*intervals: tuple[str, str, float, float], length_s: float = 1.0) -> StepLanes:
    """Intervals as lane, kind, start and stop."""
    made = [Interval(lane, kind, "", start, stop - start) for lane, kind, start, stop in intervals]
    return StepLanes(step=3, wall_s=0.0, length_s=length_s, intervals=made)


def found(*intervals: tuple[str, str, float, float], length_s: float = 1.0) -> Attribution:
    return attribute(step_of(*intervals, length_s=length_s))


def test_a_step_that_only_computes_is_bound_by_the_computation() -> None:
    one = found(("gpu", "forward", 0.0, 0.3), ("gpu", "backward", 0.3, 0.98))
    assert one.bound == "gpu" and one.because == "computation 980 ms of 1.00 s"
    assert one.work_s == pytest.approx({"forward": 0.3, "backward": 0.68})
    assert one.waits_s == pytest.approx({"host": 0.02})


def test_time_of_which_nothing_is_recorded_stands_beside_the_computation() -> None:
    one = found(("gpu", "forward", 0.0, 0.3), ("gpu", "backward", 0.4, 0.96))
    assert one.bound == "gpu"
    assert one.told == "computation 860 ms of 1.00 s, unrecorded 140 ms (14 %)"


def test_the_optimizer_that_is_waited_for_is_named_with_its_time_and_the_wait() -> None:
    one = found(
        ("stall", "update", 0.0, 0.12),
        ("gpu", "forward", 0.12, 0.3),
        ("gpu", "backward", 0.3, 0.75),
        ("cpu", "update", 0.0, 0.41),
        length_s=0.75,
    )
    assert one.bound == "cpu"
    assert one.because == "cpu optimizer 410 ms of 750 ms, the computation waits 120 ms for it"
    assert one.waits_s == pytest.approx({"update": 0.12})


@pytest.mark.parametrize(("until_s", "bound"), [(0.5, "disk"), (0.4, "cpu")])
def test_an_update_whose_states_the_disk_moves_all_the_time_waits_for_the_disk(
    until_s: float, bound: str
) -> None:
    one = found(
        ("stall", "update", 0.0, 0.5),
        ("cpu", "update", 0.0, 0.5),
        ("disk", "spilled", 0.0, until_s),
        ("disk", "checkpoint", until_s, 0.5),
        ("gpu", "forward", 0.5, 1.0),
    )
    assert one.bound == bound and one.waits_for(bound) == pytest.approx(0.5)


def test_processes_that_are_waited_for_bind_the_step() -> None:
    one = found(("gpu", "backward", 0.0, 0.7), ("stall", "ranks", 0.7, 1.0))
    assert one.bound == "ranks"
    told = "computation 700 ms of 1.00 s, waits 300 ms for other processes"
    assert one.because == told and one.told in summary_lines(one, "run")[-1]


def test_a_stall_for_weights_while_no_copy_runs_is_a_wait_for_their_update() -> None:
    one = found(
        ("stall", "weights", 0.0, 0.5),
        ("cpu", "update", 0.0, 0.4),
        ("h2d", "weights", 0.4, 0.5),
        ("gpu", "forward", 0.5, 1.0),
    )
    assert one.waits_s == pytest.approx({"update": 0.4, "weights": 0.1})
    assert one.bound == "cpu" and one.waits_for("h2d") == pytest.approx(0.1)


def test_moments_beside_the_backward_pass_hide_no_wait_for_weights_and_cost_nothing() -> None:
    one = found(
        ("gpu", "forward", 0.0, 0.3),
        ("cpu", "update", 0.0, 0.3),
        ("cpu", "moments", 0.3, 0.9),
        ("host", "moments", 0.35, 0.55),  # the driving thread waits, the computation goes on
        ("stall", "weights", 0.6, 0.8),  # in the backward pass, which no update holds up
        ("gpu", "backward", 0.3, 0.6),
        ("gpu", "backward", 0.8, 1.0),
    )
    assert one.waits_s == pytest.approx({"weights": 0.2})
    assert one.busy_s["cpu"] == pytest.approx(0.9)
    assert one.bound == "h2d"


@pytest.mark.parametrize(
    ("wait", "lane", "cause"),
    [
        (("stall", "weights", 0.0, 0.4), "h2d", "weights"),
        (("stall", "activations", 0.0, 0.4), "h2d", "activations"),
        (("stall", "gradients", 0.0, 0.4), "d2h", "gradients"),
        (("host", "moments", 0.0, 0.4), "cpu", "moments"),
        (("disk", "checkpoint", 0.0, 0.4), "disk", "checkpoint"),
        (("stall", "disk", 0.0, 0.4), "disk", "disk"),
        (("host", "data", 0.0, 0.4), "host", "data"),
        (("stall", "moonlight", 0.0, 0.4), "host", "moonlight"),
    ],
)
def test_each_cause_names_who_is_waited_for(
    wait: tuple[str, str, float, float], lane: str, cause: str
) -> None:
    one = found(wait, ("gpu", "forward", 0.4, 1.0))
    assert one.waits_s == pytest.approx({cause: 0.4}) and one.bound == lane


def test_reads_of_weights_that_nothing_waits_for_are_no_checkpoint() -> None:
    one = found(("disk", "weights", 0.0, 0.9), ("gpu", "forward", 0.1, 1.0))
    assert one.waits_s == pytest.approx({"host": 0.1})
    assert one.busy_s["disk"] == pytest.approx(0.9)


SOME = st.lists(
    st.tuples(
        st.sampled_from(LANES),
        st.sampled_from(["forward", "update", "weights", "data", "checkpoint", "gradients"]),
        st.floats(0, 1),
        st.floats(0, 1),
    ).map(lambda t: (t[0], t[1], min(t[2:]), max(t[2:]))),
    max_size=30,
)


@given(SOME)
def test_computing_and_waiting_partition_the_step(
    intervals: list[tuple[str, str, float, float]],
) -> None:
    one = found(*intervals)
    assert one.busy_s["gpu"] + sum(one.waits_s.values()) == pytest.approx(1.0, abs=1e-9)
    assert all(seconds > 0 for seconds in one.waits_s.values())
    for lane in BUSY_LANES:
        alone = sum(stop - start for name, _, start, stop in intervals if name == lane)
        assert 0 <= one.busy_s[lane] <= min(1.0, alone) + 1e-9
    assert one.bound in (*BUSY_LANES, "host")


def test_the_summary_names_every_lane_its_share_and_the_bound() -> None:
    one = found(
        ("gpu", "forward", 0.12, 0.75), ("cpu", "update", 0.0, 0.41), ("stall", "update", 0, 0.12),
        length_s=0.75,
    )  # fmt: skip
    text = "\n".join(summary_lines(one, "last"))
    for part in (
        "last: step 3, 750 ms", "computation", "84 %", "cpu optimizer", "410 ms", "55 %",
        "waited for 120 ms", "16 %", "bound: cpu optimizer",
    ):  # fmt: skip
        assert part in text, part


def test_a_gpu_that_is_no_faster_than_its_work_is_queued_is_bound_by_the_host() -> None:
    one = found(
        ("gpu", "forward", 0.0, 0.4), ("gpu", "backward", 0.4, 0.95), ("queue", "forward", 0, 0.6)
    )
    assert one.queued_s == pytest.approx(0.6) and one.waits_s == pytest.approx({"host": 0.05})
    assert one.bound == "host" and one.busy_s["gpu"] == pytest.approx(0.95)
    assert one.because == ("computation 950 ms of 1.00 s, 600 ms of it queued late by the host")
    rows = [row for row in summary_lines(one, "last") if "  of it" in row]
    assert "600 ms" in rows[0] and "60 %" in rows[0]
