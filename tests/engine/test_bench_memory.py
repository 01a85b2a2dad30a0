"""Host memory of a benchmark's row, by trained parameters and by those at home."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "bench"))
from memory_watch import GIB, host_figures

ROW = {
    "parameters_trained": 4 * GIB, "parameters_on_host": 2 * GIB, "block_inputs_on_host_gib": 2.0,
}  # fmt: skip


def test_bytes_a_parameter_leave_boundaries_out() -> None:
    assert host_figures(ROW, 30 * GIB, 10 * GIB) == {
        "host_gib": 30.0, "host_setup_gib": 10.0, "host_training_gib": 30.0,
        "host_bytes_per_trained": 7.0, "host_bytes_per_on_host": 14.0,
    }  # fmt: skip


def test_a_row_with_nothing_at_home_has_no_bytes_by_it() -> None:
    row = ROW | {"parameters_on_host": 0, "block_inputs_on_host_gib": 0.0}
    found = host_figures(row, 2 * GIB, GIB)
    assert found["host_bytes_per_trained"] == 0.5
    assert "host_bytes_per_on_host" not in found


def test_a_row_is_judged_by_the_peak_of_its_set_up_where_that_is_the_larger() -> None:
    figures = host_figures(ROW, 18 * GIB, 30 * GIB)
    assert figures["host_gib"] == figures["host_setup_gib"] == 30.0
    assert figures["host_training_gib"] == 18.0
    assert figures["host_bytes_per_trained"] == 7.0
