"""Holds a run to the device memory that its configuration grants, CUDA's own share included."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from fluxtrain.errors import DoesNotFit
from fluxtrain.machine.before_torch import limit_within, segments_grow
from fluxtrain.units import GIB, bytes_text

_SMALLEST_BYTES = 64 << 20


def hold_to_budget(budget_gib: float | None, others: Iterable[int] = ()) -> int | None:
    """Cap torch's allocator; returns the bytes it surely gives out (None: no budget was set), on
    the current GPU and on each of the `others`.

    What CUDA itself takes for this process (context, kernels: some hundred MiB) counts against the
    budget, because that is what `nvidia-smi` shows and what a card of that size would lose. So does
    the page by which a segment that grows may pass its limit.
    Raises DoesNotFit when nothing is left.
    """
    if budget_gib is None:
        return None
    here = torch.cuda.current_device()
    torch.zeros(1, device=torch.device("cuda", here))
    free_bytes, total_bytes = torch.cuda.mem_get_info(here)
    context_bytes = _context_bytes(total_bytes - free_bytes, here)
    budget_bytes = min(int(budget_gib * GIB), total_bytes)
    left_bytes = budget_bytes - context_bytes
    if left_bytes < _SMALLEST_BYTES:
        raise DoesNotFit(
            f"placement.budget_gib={budget_gib:g} leaves nothing beside the "
            f"{bytes_text(context_bytes)} that CUDA itself takes: set at least "
            f"{(context_bytes + GIB) / GIB:.1f}"
        )
    limit_bytes = limit_within(left_bytes, grow=segments_grow())
    torch.cuda.set_per_process_memory_fraction(limit_bytes / total_bytes, here)
    for card in others:
        total = torch.cuda.get_device_properties(card).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, limit_bytes / total), card)
    return limit_bytes


def _context_bytes(used_bytes: int, card: int) -> int:
    """This process's memory on a card outside torch: by NVML, or all that is used where NVML is
    silent."""
    from fluxtrain.machine.gpu import own_process_bytes

    own_bytes = own_process_bytes()
    return (used_bytes if own_bytes is None else own_bytes) - torch.cuda.memory_reserved(card)
