"""What communication took, from spans of a trace; and whether compression pays."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from fluxtrain.parallel.auto import choose
from fluxtrain.parallel.profile import WARM_STEPS, Ran, StepProfiler, summarised
from tests.parallel import rank_work as work
from tests.parallel.rank_pool import Ranks


def test_exposed_communication_is_that_beside_which_nothing_is_computed() -> None:
    ran = [
        Ran("gemm", 0, 100, on_gpu=True),
        Ran("ncclDevKernel_AllGather_RING_LL(args)", 50, 150, on_gpu=True),
        Ran("gemm", 150, 200, on_gpu=True),
        Ran("ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL(args)", 190, 290, on_gpu=True),
        Ran("fluxtrain::encode", 300, 310, on_gpu=True),
        Ran("aten::mm", 0, 400),  # the host queues
    ]
    found = summarised(ran, 2, 400e-6, gpu=True)
    assert found.by_operation_ms == pytest.approx({"all_gather": 0.05, "reduce_scatter": 0.05})
    assert found.comm_ms == pytest.approx(0.1)
    assert found.exposed_ms == pytest.approx((50 + 90) / 2 * 1e-3)
    assert found.overlap == pytest.approx(1 - 140 / 200)
    assert found.comm_share == pytest.approx(0.5)
    assert found.encode_ms == pytest.approx(0.005)
    assert "reduce_scatter" in found.table()
    assert "gloo" not in found.table()


def test_names_of_gloo_are_those_of_nccl() -> None:
    ran = [Ran("gloo:all_to_all", 0, 10), Ran("gloo:all_gather", 20, 30),
           Ran("aten::mm", 5, 10)]  # fmt: skip
    found = summarised(ran, 1, 100e-6, gpu=False)
    assert set(found.by_operation_ms) == {"all_to_all", "all_gather"}
    assert found.exposed_ms == pytest.approx(0.015)
    assert "say nothing about a GPU" in found.table()
    alone = summarised([Ran("aten::mm", 0, 10)], 1, 1e-3, gpu=False)
    assert (alone.comm_ms, alone.overlap) == (0.0, 0.0)


def test_steps_take_all_of_the_time_that_is_profiled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))  # torch's profiler sets it
    profiler = StepProfiler(tmp_path, 2, gpu=False)
    assert [profiler.step_done() for _ in range(WARM_STEPS)] == [None] * WARM_STEPS
    torch.ones(256, 256) @ torch.ones(256, 256)
    assert profiler.step_done() is None
    found = profiler.end()
    assert found is not None and found.steps == 1 and found is profiler.found
    assert 0 < found.compute_ms < found.step_ms


def test_compression_is_chosen_where_it_is_measured_to_pay() -> None:
    assert choose(0.010, 0.006, 0.3).value == "int8"
    slow = choose(0.010, 0.012, 0.3)
    assert slow.value == "none"
    assert "int8 takes 12.00 ms for a block's gradients, bf16 10.00" in slow.because
    hidden = choose(0.010, 0.001, 0.04)
    assert hidden.value == "none"
    assert "4.0% of a step is exposed communication, less than 5%" in hidden.because


def test_both_ways_are_measured_on_the_link_between_the_ranks(ranks: Ranks) -> None:
    first, second = ranks.run(work.measured, 200_000)
    assert first == second
    assert all(0 < seconds < 5 for seconds in first)
