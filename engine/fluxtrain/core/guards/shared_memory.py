"""Tell which tensors share memory, and how often it was written to."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor


def version_of(tensor: Tensor) -> int:
    """Count the writes in place to a tensor so far; 0 for inference tensors (not counted)."""
    return 0 if tensor.is_inference() else tensor._version


def version_counter(tensor: Tensor) -> Tensor:
    """Make a tensor without memory that counts the writes to `tensor`."""
    counter = tensor.detach()
    if not counter.is_inference():
        counter.data = without_memory(tensor.dtype, tensor.device)
    return counter


@lru_cache(maxsize=64)
def without_memory(dtype: torch.dtype, device: torch.device) -> Tensor:
    """Make a tensor without elements, to set as `.data` of a tensor that must not hold memory."""
    with torch.inference_mode(False):
        return torch.empty(0, dtype=dtype, device=device)


def storage_of(tensor: Tensor) -> int:
    """Identify the memory of a tensor by its address; a sparse tensor shares memory with none."""
    return tensor.untyped_storage().data_ptr() if tensor.layout == torch.strided else id(tensor)


def same_elements(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors are the same elements of the same memory, in one shape
    and dtype."""
    return (
        storage_of(one) == storage_of(other)
        and one.dtype == other.dtype
        and one.size() == other.size()
        and one.stride() == other.stride()
        and one.storage_offset() == other.storage_offset()
    )


def overlap(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors have an element in common."""
    if not (one.numel() and other.numel()) or storage_of(one) != storage_of(other):
        return False
    if one.dtype != other.dtype:
        return True
    start = min(one.storage_offset(), other.storage_offset())
    end = max(_end(one), _end(other))
    marks = torch.zeros(end - start, dtype=torch.bool)
    for_one = marks.as_strided(one.size(), one.stride(), one.storage_offset() - start)
    for_one.fill_(True)
    for_other = marks.as_strided(other.size(), other.stride(), other.storage_offset() - start)
    return bool(for_other.any())


def same_layout_copy(tensor: Tensor) -> Tensor | None:
    """Copy a tensor with its strides, so that the same kernels compute with the copy. None for
    sparse tensors, and for expanded ones, which torch refuses to write to."""
    if tensor.layout != torch.strided:
        return None
    if any(s == 0 and n > 1 for n, s in zip(tensor.size(), tensor.stride(), strict=True)):
        return None
    memory = torch.empty_strided(
        tensor.size(), tensor.stride(), dtype=tensor.dtype, device=tensor.device
    )
    return memory.copy_(tensor.detach())


def _end(tensor: Tensor) -> int:
    last = sum((n - 1) * s for n, s in zip(tensor.size(), tensor.stride(), strict=True))
    return int(tensor.storage_offset()) + last + 1
