"""Compressed sums between ranks, in FSDP2 and DDP, on gloo."""

from __future__ import annotations

import math
from typing import Any

import pytest

from fluxtrain.parallel.compress.compressor import Compressor
from fluxtrain.parallel.compress.registry import BY_TORCH, COMPRESSORS, HYBRID, method_named
from fluxtrain.parallel.forecast import GATHERED_BYTES
from tests.parallel import rank_work as work
from tests.parallel.rank_pool import Ranks

FEEDBACK = {"error_feedback": True}
# what each method is trained with: the sparse and low-rank ones lose most of a gradient
OPTIONS: dict[str, dict[str, Any]] = {
    "int8": {}, "int8_sum": FEEDBACK, "fp8": {}, "nc": {}, "qsgd": {}, "onebit": FEEDBACK,
    "topk": {**FEEDBACK, "ratio": 0.1}, "thresholdv": {**FEEDBACK, "threshold": 0.01},
    "randomk": {**FEEDBACK, "scale": False, "ratio": 0.25}, "gradiveq": FEEDBACK,
    "sketch": {"ratio": 0.9, "keep": 0.2}, "powersgd": FEEDBACK,
    "hybrid": {**FEEDBACK, "sparse": "topk", "quant": "int8", "sparse_config": {"ratio": 0.1}},
    "signsgd": {},
}  # fmt: skip
STEPS = 12


def test_every_method_sums_over_ranks_and_counts_what_lay_in_the_buffers(ranks: Ranks) -> None:
    for name in (*COMPRESSORS, HYBRID):
        first, second = ranks.run(work.sums, name, {})
        if name in ("none", "bf16", "int8", "fp8"):
            assert max(*first[:2], *second[:2]) < 0.04, name
        assert all(math.isfinite(error) for error in (*first[:2], *second[:2])), name
        counted, lay = first[2:]
        assert counted == lay, name


def test_sharded_training_follows_the_raw_one_with_every_method(ranks: Ranks) -> None:
    raw = ranks.run(work.sharded_losses, "none", {}, STEPS, False)[0]
    assert raw[-1] < 0.5 * raw[0]
    for name, options in OPTIONS.items():
        losses = ranks.run(work.sharded_losses, name, options, STEPS, False)
        assert losses[0] == losses[1]
        assert losses[0][0] == raw[0], name
        if name in ("signsgd", "sketch"):  # without a scale, and estimates: far from the raw one
            assert all(map(math.isfinite, losses[0]))
            continue
        near = 0.02 if name in ("int8", "fp8", "int8_sum") else 0.6
        assert abs(losses[0][-1] - raw[-1]) < near * raw[-1] + 0.1 * near, (name, losses[0], raw)


def test_gathered_weights_may_be_rounded(ranks: Ranks) -> None:
    raw = ranks.run(work.sharded_losses, "none", {}, STEPS, False)[0]
    rounded = ranks.run(work.sharded_losses, "int8", {}, STEPS, True)
    assert rounded[0] == rounded[1]
    assert 0 < abs(rounded[0][-1] - raw[-1]) < 0.05 * raw[-1]


def test_an_exchange_takes_the_memory_that_plans_count(ranks: Ranks) -> None:
    for name in COMPRESSORS.keys() - BY_TORCH:
        counted = method_named(name).compressor.work_bytes
        of_shards, of_replicas = (
            ranks.run(work.work_bytes_of_a_number, name, how)[0]
            for how in ("scatter_sum", "gather_sum")
        )
        assert of_shards <= 1.02 * counted, name
        assert of_replicas <= 1.02 * (counted + ranks.count), name
        assert counted == Compressor.work_bytes or of_replicas > 0.8 * counted, name
    for name in ("int8", "onebit"):
        counted = method_named(name).compressor.work_bytes
        for how, received in (("scatter_sum", 0), ("gather_sum", ranks.count)):
            taken, _ = ranks.run(work.work_bytes_with_feedback, name, how)
            assert taken - 4 <= 1.02 * (counted + received), (name, how)  # plans count residuals
    for name in ("int8", "fp8"):
        taken, _ = ranks.run(work.work_bytes_of_a_number, name, "gather")
        assert 0.8 * GATHERED_BYTES < taken <= 1.2 * GATHERED_BYTES, name


@pytest.mark.slow
def test_more_replicas_take_hardly_more_memory(four_ranks: Ranks) -> None:
    for name in COMPRESSORS.keys() - BY_TORCH - {"thresholdv"}:  # which may send all values
        taken = four_ranks.run(work.work_bytes_of_a_number, name, "gather_sum")[0]
        counted = method_named(name).compressor.work_bytes
        assert taken <= 1.02 * (counted + four_ranks.count), name


def test_ddp_takes_every_method_and_keeps_residuals_by_parameter(ranks: Ranks) -> None:
    raw, _ = ranks.run(work.ddp_losses, "none", {}, STEPS)[0]
    for name in ("fp16", "bf16", "int8", "topk"):
        losses, residuals = ranks.run(work.ddp_losses, name, OPTIONS.get(name, {}), STEPS)[0]
        near = 0.5 if name == "topk" else 0.02
        assert abs(losses[-1] - raw[-1]) < near * raw[-1], name
        if name == "topk":  # torch has made its buckets anew after the first step
            names = [name for name, _ in work.Net().named_parameters()]
            assert residuals == sorted(names)
        elif name in BY_TORCH:
            assert not residuals


def test_numbers_that_are_not_finite_reach_every_sum_and_no_residual(ranks: Ranks) -> None:
    assert ranks.run(work.poisoned) == [(True, True, True)] * 2


def test_a_resumed_exchange_gives_the_same_bits(ranks: Ranks) -> None:
    assert ranks.run(work.resumed_equal) == [True, True]


def test_gradients_of_other_parameters_than_before_are_refused(ranks: Ranks) -> None:
    for said in ranks.run(work.unlike_sizes):
        assert "blocks.0 has gradients of 80 numbers where it had 100" in said
        assert "error_feedback off" in said


@pytest.mark.slow
def test_four_ranks_sum_and_train(four_ranks: Ranks) -> None:
    for name in (*COMPRESSORS, HYBRID):
        first, *_ = four_ranks.run(work.sums, name, {})
        assert first[2] == first[3], name
    raw = four_ranks.run(work.sharded_losses, "none", {}, STEPS, False)[0]
    for name in ("int8", "int8_sum", "topk"):
        losses = four_ranks.run(work.sharded_losses, name, OPTIONS[name], STEPS, False)
        assert losses[0] == losses[3]
        assert abs(losses[0][-1] - raw[-1]) < 0.6 * raw[-1], name


@pytest.mark.slow
def test_sums_between_replicas_are_compressed(four_ranks: Ranks) -> None:
    raw = four_ranks.run(work.sharded_losses, "none", {}, STEPS, False)[0]
    losses = four_ranks.run(work.replicated_losses, "int8", {}, STEPS)
    assert losses[0] == losses[3]
    assert 0 < abs(losses[0][-1] - raw[-1]) < 0.02 * raw[-1]
