"""Task 7: many adapters in one batch."""

from torch import Tensor


def forward(
    hidden: Tensor,  # (rows, in)
    base: Tensor,  # (out, in)
    down: Tensor,  # (adapters, rank, in): each adapter's A
    up: Tensor,  # (adapters, out, rank): each adapter's B
    scales: Tensor,  # (adapters,)
    chosen: Tensor,  # (rows,): the adapter of each row; -1: the base alone
) -> Tensor:  # (rows, out)
    raise NotImplementedError
