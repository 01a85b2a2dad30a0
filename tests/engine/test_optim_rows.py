"""Rows of a table have, ahead of its update, the bits that it will write."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from fluxtrain.optim.flat import Flat
from fluxtrain.optim.hyper import AdamWUpdate, Hyper
from fluxtrain.optim.reference import encode, rounding
from fluxtrain.optim.row_adamw import weights_of_rows
from fluxtrain.optim.step import step_
from fluxtrain.plan.states import STATE_BLOCK

TABLE_ROWS, WIDTH = 700, 96
UPDATE = AdamWUpdate(hyper=Hyper(lr=1e-2, weight_decay=0.1), step=3, scale=0.7)
MOMENTS = pytest.mark.parametrize("moments", ["fp32", "bf16", "8bit"])
WEIGHTS = pytest.mark.parametrize("weights", [torch.bfloat16, torch.float32])


def table(weights: torch.dtype, moments: str, gradient: torch.dtype | None = None) -> Flat:
    draw, n = torch.Generator().manual_seed(1), TABLE_ROWS * WIDTH
    master, m, v, g = (torch.randn(n, generator=draw) * size for size in (0.02, 1e-3, 1e-3, 0.1))
    hi, lo = encode(master) if weights is torch.bfloat16 else (master, None)
    scales: dict[str, Tensor | None] = {"m_scale": None, "v_scale": None}
    v = v.square()
    if moments == "bf16":
        m, v = m.to(torch.bfloat16), v.to(torch.bfloat16)
    elif moments == "8bit":
        m, v = (torch.randint(0, 256, (n,), generator=draw).to(torch.uint8) for _ in range(2))
        blocks = -(-n // STATE_BLOCK)
        scales = {name: torch.rand(blocks, generator=draw) * 1e-4 for name in scales}
    return Flat(
        weights=hi, lo=lo, m=m, v=v, gradient=g.to(gradient or weights),
        rounding=rounding(5, 3, 0), **scales,
    )  # fmt: skip


def tensors(flat: Flat) -> dict[str, Tensor]:
    return {name: value for name, value in vars(flat).items() if isinstance(value, Tensor)}


def copied(flat: Flat) -> Flat:
    return replace(flat, **{name: value.clone() for name, value in tensors(flat).items()})


def into(flat: Flat, rows: Tensor) -> Tensor:
    return torch.zeros((len(rows), WIDTH), dtype=flat.weights.dtype)


@MOMENTS
@WEIGHTS
@pytest.mark.parametrize("threads", [1, 3])
def test_rows_have_the_bits_of_their_tables_update_which_they_leave_to_it(
    weights: torch.dtype, moments: str, threads: int
) -> None:
    flat = table(weights, moments)
    before, after = copied(flat), copied(flat)
    step_(after, UPDATE)
    rows = torch.tensor([699, 0, 3, 3, *range(10, 690)])
    found = into(flat, rows)
    weights_of_rows(flat, rows, found, UPDATE, threads=threads)
    assert torch.equal(found, after.weights.view(-1, WIDTH)[rows])
    assert not torch.equal(found, before.weights.view(-1, WIDTH)[rows])
    kept = tensors(before)
    assert all(torch.equal(value, kept[name]) for name, value in tensors(flat).items())


@MOMENTS
def test_gradients_may_be_sums_of_several_passes(moments: str) -> None:
    flat = table(torch.bfloat16, moments, torch.float32)
    after, rows = copied(flat), torch.arange(5, 400)
    step_(after, UPDATE)
    found = into(flat, rows)
    weights_of_rows(flat, rows, found, UPDATE)
    assert torch.equal(found, after.weights.view(-1, WIDTH)[rows])


def test_no_rows_are_none() -> None:
    flat, rows = table(torch.bfloat16, "fp32"), torch.zeros(0, dtype=torch.int64)
    weights_of_rows(flat, rows, into(flat, rows), UPDATE)


@pytest.mark.parametrize("row", [-1, TABLE_ROWS])
def test_rows_that_the_table_does_not_have_are_refused(row: int) -> None:
    flat, rows = table(torch.bfloat16, "fp32"), torch.tensor([3, row])
    with pytest.raises(IndexError, match="of a table of 700"):
        weights_of_rows(flat, rows, into(flat, rows), UPDATE)


def test_what_would_corrupt_memory_is_refused() -> None:
    flat, rows = table(torch.bfloat16, "fp32"), torch.tensor([3, 5])
    found = into(flat, rows)
    for wrong, error in (
        ((flat, rows.int(), found), TypeError),
        ((flat, rows, found.float()), TypeError),
        ((flat, rows, found[:, ::2]), ValueError),
        ((flat, rows, found[:1]), ValueError),
        ((flat, rows, torch.zeros((2, 97), dtype=torch.bfloat16)), ValueError),
        ((replace(flat, gradient=flat.gradient[1:]), rows, found), ValueError),
        ((replace(flat, v=flat.v.bfloat16()), rows, found), TypeError),
        ((replace(flat, master=flat.m), rows, found), TypeError),
    ):
        with pytest.raises(error):
            weights_of_rows(*wrong, UPDATE)
