"""The loops of the GPU benchmarks, on the processor: whose losses are to agree, agree."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from transformers import Qwen2Config

import fluxtrain
from fluxtrain.core.wrap.engine import engine_of

sys.path.insert(0, str(Path(__file__).parents[2] / "bench"))
from bench_gpu import batch
from gpu_engines import FluxLoop, Loop, MastersLoop
from random_model import random_model
from verdicts import SAME_LOSSES, furthest

CPU = torch.device("cpu")
RATE, STEPS = 1e-2, 8
TINY = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 320, "max_position_embeddings": 128,
}  # fmt: skip


def losses(loop: Loop) -> list[float]:
    generator = torch.Generator().manual_seed(1)
    found = []
    for _ in range(STEPS):
        ids = torch.randint(0, 320, (2, 32), generator=generator)
        found.append(float(loop.step(ids)))
    return found


def masters(*, clipped: bool, masters_off_by: float = 0.0) -> list[float]:
    model = random_model(Qwen2Config(**TINY), CPU, CPU)
    return losses(MastersLoop(model, RATE, clipped=clipped, masters_off_by=masters_off_by))


def flux(*, in_backward: bool, passes: int = 1) -> list[float]:
    model = random_model(Qwen2Config(**TINY), CPU, CPU)
    fluxtrain.wrap(model, device="cpu", offload="weights", chunk_rows=2)
    return losses(FluxLoop(model, engine_of(model), RATE, in_backward=in_backward, passes=passes))


def test_a_step_in_backward_has_the_losses_of_the_loop_that_does_not_clip() -> None:
    unclipped, clipped = masters(clipped=False), masters(clipped=True)
    assert furthest(flux(in_backward=True), unclipped) <= SAME_LOSSES
    assert furthest(flux(in_backward=False), clipped) <= SAME_LOSSES
    assert furthest(clipped, unclipped) > SAME_LOSSES, "these losses tell the two loops apart"


def test_a_step_of_two_backward_passes_has_the_losses_of_one() -> None:
    found = flux(in_backward=False, passes=2)
    assert furthest(found, masters(clipped=True)) <= 2 * SAME_LOSSES  # the first is rounded alone


def test_batches_are_rows_of_all_of_the_text_in_one_random_order() -> None:
    tokens = torch.arange(1003)
    steps = [batch(tokens, step, 20, 10) for step in range(5)]
    rows = torch.cat(steps)
    assert torch.equal(rows[:, 0].sort().values, torch.arange(0, 1000, 10))  # each once
    assert torch.equal(rows - rows[:, :1], torch.arange(10).expand(100, 10))
    assert not torch.equal(rows[:, 0], rows[:, 0].sort().values)
    assert torch.equal(batch(tokens, 1, 30, 10)[:10], steps[1][10:])  # the order is of rows
    assert torch.equal(batch(tokens, 5, 20, 10), steps[0])  # and goes round


def test_masters_that_begin_elsewhere_drift_away_from_the_loop_itself() -> None:
    loop = masters(clipped=True)
    assert masters(clipped=True) == loop
    near, far = (masters(clipped=True, masters_off_by=by) for by in (2.0**-20, 2.0**-6))
    assert near[0] == loop[0]  # the weights are the same
    assert 0 < furthest(near, loop) < furthest(far, loop)
