"""Which steps of a benchmark are timed, and which of them its trace shows."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "bench"))
from step_timeline import middle, timed_steps

from fluxtrain.events.trace.lanes import StepLanes


def steps(*lengths_s: float) -> list[StepLanes]:
    return [
        StepLanes(step=number, wall_s=0.0, length_s=length_s, intervals=())
        for number, length_s in enumerate(lengths_s, 1)
    ]


def test_neither_warm_up_nor_the_last_step_is_timed() -> None:
    found = timed_steps(steps(42.4, 12.4, 11.1, 11.4, 11.3, 11.5, 12.0))
    assert [one.step for one in found] == [4, 5, 6]
    assert middle(found).length_s == 11.4


def test_the_trace_of_an_even_number_is_of_a_step_near_the_median() -> None:
    assert middle(steps(1.0, 1.4, 1.6, 9.0)).length_s in (1.4, 1.6)
    assert middle(steps(0.1, 5.0, 5.1, 5.3)).length_s in (5.0, 5.1)


def test_a_benchmark_of_four_steps_has_no_timed_one() -> None:
    assert timed_steps(steps(9.0, 1.0, 1.0, 1.0)) == []
    assert timed_steps([]) == []
