"""Blocks told as runs: nothing is lost, and a plain model takes one line."""

from __future__ import annotations

import pytest

from fluxtrain.core.runtime.stats import BlockSizes, runs_of
from fluxtrain.events.events import BlockRun

Block = tuple[str, BlockSizes]


def told(runs: tuple[BlockRun, ...]) -> list[Block]:
    return [
        (
            run.name.replace("{}", str(run.first + i)),
            BlockSizes(
                weights=run.weights_bytes, gradients=run.gradients_bytes,
                optimizer=run.optimizer_bytes, frozen=run.frozen_bytes, packed=run.packed_bytes,
            ),
        )
        for run in runs
        for i in range(run.count)
    ]  # fmt: skip


def sized(weights: int = 1, gradients: int = 2, optimizer: int = 3, **rest: int) -> BlockSizes:
    return BlockSizes(weights=weights, gradients=gradients, optimizer=optimizer, **rest)


PLAIN = [(f"model.layers.{i}", sized(10, 20, 30)) for i in range(36)]
MIXED = [(f"m.layers.{i}.x", sized(10 + i % 2, 20, 30)) for i in range(6)]
PACKED = [(f"m.layers.{i}", sized(10, frozen=1, packed=4 + i // 3)) for i in range(6)]
TWO_LISTS = [
    *((f"encoder.{i}", sized()) for i in range(4)),
    *((f"decoder.{i}", sized()) for i in range(4)),
]
GAPS = [(name, sized(1, 1, 1)) for name in ("a.0", "a.2", "head", "head")]


@pytest.mark.parametrize("blocks", [PLAIN, MIXED, PACKED, TWO_LISTS, GAPS, []])
def test_every_block_is_told_with_its_name_and_sizes(blocks: list[Block]) -> None:
    assert told(runs_of(blocks)) == blocks


def test_equal_neighbours_are_one_run() -> None:
    assert len(runs_of(PLAIN)) == 1
    assert len(runs_of(TWO_LISTS)) == 2
    assert len(runs_of(MIXED)) == 6
    assert len(runs_of(PACKED)) == 2


def test_the_last_number_of_a_name_counts() -> None:
    [run] = runs_of([(f"stage2.block.{i}.mlp", sized()) for i in (7, 8)])
    assert (run.name, run.first, run.count) == ("stage2.block.{}.mlp", 7, 2)
