"""Blocks told as runs: nothing is lost, and a plain model takes one line."""

from __future__ import annotations

import pytest

from fluxtrain.runtime.block_runs import Sizes, runs_of
from fluxtrain.telemetry.events import BlockRun


def told(runs: tuple[BlockRun, ...]) -> list[Sizes]:
    return [
        (
            run.name.replace("{}", str(run.first + i)), run.weights_bytes, run.gradients_bytes,
            run.optimizer_bytes,
        )
        for run in runs
        for i in range(run.count)
    ]  # fmt: skip


PLAIN = [(f"model.layers.{i}", 10, 20, 30) for i in range(36)]
MIXED = [(f"m.layers.{i}.x", 10 + i % 2, 20, 30) for i in range(6)]
TWO_LISTS = [
    *((f"encoder.{i}", 1, 2, 3) for i in range(4)),
    *((f"decoder.{i}", 1, 2, 3) for i in range(4)),
]
GAPS = [("a.0", 1, 1, 1), ("a.2", 1, 1, 1), ("head", 1, 1, 1), ("head", 1, 1, 1)]


@pytest.mark.parametrize("blocks", [PLAIN, MIXED, TWO_LISTS, GAPS, []])
def test_every_block_is_told_with_its_name_and_sizes(blocks: list[Sizes]) -> None:
    assert told(runs_of(blocks)) == blocks


def test_equal_neighbours_are_one_run() -> None:
    assert len(runs_of(PLAIN)) == 1
    assert len(runs_of(TWO_LISTS)) == 2
    assert len(runs_of(MIXED)) == 6


def test_the_last_number_of_a_name_counts() -> None:
    [run] = runs_of([("stage2.block.7.mlp", 1, 1, 1), ("stage2.block.8.mlp", 1, 1, 1)])
    assert (run.name, run.first, run.count) == ("stage2.block.{}.mlp", 7, 2)
