"""A made-up run for changes and advice: 8 streamed blocks of 100 MiB in bf16 on a GPU of 4 GiB."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from fluxtrain.plan.facts import GroupFacts, ModelFacts, RowFacts
from fluxtrain.plan.footprint import Layout, footprint
from fluxtrain.plan.rates import Rates
from fluxtrain.train.live.advice import RunFacts, StepFacts
from fluxtrain.train.live.edit import MemoryInUse
from fluxtrain.train.live.live_run import LiveRun
from fluxtrain.units import GIB, MIB
from tests.placements import placement_of

BLOCK_BYTES = 100 * MIB
BLOCKS = 8


def group(name: str, weight_bytes: int, *, trained: bool = True) -> GroupFacts:
    frozen = name.startswith("layer") and not trained
    return GroupFacts(
        file_bytes=weight_bytes if frozen else 0,
        name=name,
        kind="block" if name.startswith("layer") else "edge",
        weight_bytes=weight_bytes,
        trained_bf16=weight_bytes // 2 if trained else 0,
    )


def ground(*, trained: bool = True, budget_bytes: int | None = 4 * GIB, **layout: Any) -> LiveRun:
    facts = ModelFacts(
        groups=(
            group("embedding", 10 * MIB),
            *(group(f"layer{i}", BLOCK_BYTES, trained=trained) for i in range(BLOCKS)),
            group("norm", MIB),
        ),
        row=RowFacts(
            hidden=1024, vocabulary=5120, sequence_length=512, dtype_bytes=2,
            activation_bytes=20 * MIB,
        ),
    )  # fmt: skip
    settings = {"offload": "weights", "batch_rows": 8, "chunk_rows": 2, **layout}
    planned, has_gpu = Layout(**settings), budget_bytes is not None
    need = footprint(facts, planned, has_gpu=has_gpu)
    return LiveRun(facts, placement_of(facts, planned, need, budget_bytes=budget_bytes), has_gpu)


RATES = Rates(
    has_gpu=True, matmul_per_s=4e13, adamw_per_s=4e9, h2d_bytes_per_s=10e9, d2h_bytes_per_s=10e9
)


def steps(**changes: Any) -> StepFacts:
    """A step of one second that waits for nothing."""
    calm = StepFacts(
        count=20, step_s=1.0, forward_s=0.3, backward_s=0.6, data_s=0.0, stalls_s={}
    )  # fmt: skip
    return replace(calm, **changes)


def facts(of: LiveRun | None = None, **changes: Any) -> RunFacts:
    on = of or ground()
    known = RunFacts(
        run=on,
        settings=on.planned,
        steps=steps(),
        memory=MemoryInUse(),
        rates=RATES,
        passes=1,
        clips=True,
    )
    return replace(known, **changes)
