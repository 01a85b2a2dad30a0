"""Rows of a table: found, gathered, and scattered into zeros."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from fluxtrain.core.device.cpu_device import CpuDevice
from fluxtrain.core.gradients.row_sum import RowTransfer, Scatter, norm_by_rows
from fluxtrain.core.memory.rows import Gather, Places, RowBuffers


def table_of(flat: Tensor) -> Tensor:
    return flat[: 50 * 4].view(50, 4)


def gather(table: Tensor) -> Gather:
    return lambda rows, into: torch.index_select(table, 0, rows, out=into)


def test_rows_are_brought_as_they_are() -> None:
    device = CpuDevice()
    table = torch.randn(50, 4)
    buffers = RowBuffers(device, 50, 4, torch.float32)
    for seed in range(3):
        ids = torch.randint(0, 50, (20 + seed,), generator=torch.Generator().manual_seed(seed))
        uploaded, transfers = buffers.upload(Places.of(ids), gather(table))
        for transfer in transfers:
            transfer.wait_compute("weights")
        assert torch.equal(uploaded.rows[uploaded.of_tokens], table[ids])
        buffers.release()
    buffers.give_back()
    assert buffers.device_bytes == buffers.host_bytes == 0
    device.close()


def test_a_table_holds_the_last_rows_and_zeros_whatever_was_there() -> None:
    scatter, flat = Scatter(), torch.full((210,), 7.0)
    for rows in ([3, 4], [4, 20, 49], []):
        values = torch.randn(len(rows), 4)
        scatter.fill(flat, torch.tensor(rows, dtype=torch.int64), values, 50)
        expected = torch.zeros(50, 4)
        expected[rows] = values
        assert torch.equal(table_of(flat), expected)
        assert not flat[200:].any()


class Late:
    """A copy whose bytes are there when it was waited for."""

    def __init__(self, flat: Tensor) -> None:
        self._flat = flat

    def wait_host(self) -> None:
        self._flat.numpy()[:] = 3.0


@pytest.mark.parametrize("clears", [True, False])
def test_a_table_that_was_cleared_ahead_is_not_cleared_again(
    clears: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    scatter, flat = Scatter(), torch.full((210,), 7.0)
    if clears:
        late: Any = Late(flat)
        scatter.clear_ahead(flat, [[], [late]])
        assert not flat.any()
    zeroed: list[int] = []
    zero = Tensor.zero_

    def noted(tensor: Tensor) -> Tensor:
        zeroed.append(tensor.numel())
        return zero(tensor)

    monkeypatch.setattr(Tensor, "zero_", noted)
    for row in (3, 5):
        scatter.fill(flat, torch.tensor([row]), torch.ones(1, 4), 50)
        scatter.clear_ahead(flat, [[Late(flat)]])  # type: ignore[list-item]  # the rows are known
        assert table_of(flat).nonzero()[:, 0].unique().tolist() == [row]
    assert zeroed == [210] * (not clears)


def test_a_table_that_somebody_has_seen_is_cleared_when_the_rows_are_there() -> None:
    scatter, flat = Scatter(), torch.zeros(200)
    scatter.handed_out(flat)
    scatter.clear_ahead(flat, [])
    flat.numpy()[:] = 5.0
    scatter.fill(flat, torch.tensor([2]), torch.ones(1, 4), 50)
    assert table_of(flat).sum() == 4


def test_rows_of_zeros_change_no_bit_of_the_norm() -> None:
    for dtype in (torch.bfloat16, torch.float32):
        table = torch.zeros(5000, 96, dtype=dtype)
        rows = torch.randperm(5000)[:700].sort().values
        table[rows] = torch.randn(700, 96).to(dtype)
        few = norm_by_rows(table[rows], rows, 5000)
        assert torch.equal(few, norm_by_rows(table))
        assert float(few) == pytest.approx(float(table.double().norm()), rel=1e-6)


def test_a_gradient_lands_once_whoever_waits() -> None:
    landed: list[int] = []
    device = CpuDevice()
    transfer = RowTransfer(device.download(torch.zeros(4), torch.ones(4)), lambda: landed.append(1))
    transfer.wait_host()
    transfer.wait_host()
    transfer.wait_compute("gradients")
    assert transfer.done()
    assert not transfer.failed()
    assert transfer.instants() is not None
    assert transfer.duration_s is not None
    assert landed == [1]
    device.close()
