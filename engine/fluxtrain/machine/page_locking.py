"""Page-locks host memory for CUDA, and words the limit of it."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from fluxtrain.units import bytes_text


@contextmanager
def page_locked(address: int, size_bytes: int) -> Iterator[bool]:
    """Lock a range of this process's memory for CUDA; return False, with the range unchanged, if
    that is refused."""
    import torch

    runtime: Any = torch.cuda.cudart  # torch gives it no types
    cuda = runtime()
    granted = int(cuda.cudaHostRegister(address, size_bytes, 0)) == 0
    if not granted:
        forget_cuda_error()
    try:
        yield granted
    finally:
        if granted:
            cuda.cudaHostUnregister(address)


def lock_limit_text(locked_bytes: int | None = None) -> str:
    """Say how the locked bytes compare with RLIMIT_MEMLOCK; empty if it is unlimited."""
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    if limit == resource.RLIM_INFINITY:
        return ""
    if locked_bytes is not None and locked_bytes > limit:
        return f", the limit of {bytes_text(limit)} does not hold for CUDA"
    return f", the limit is {bytes_text(limit)}"


def forget_cuda_error() -> None:
    """Clear the error of a failed page-lock, which the next kernel would report as its own, because
    the check after a kernel's launch reads and clears the last error."""
    import torch

    for _ in range(2):  # the second check shows that it is gone
        try:
            torch.ones(1, device="cuda").add_(1)
            torch.cuda.synchronize()
        except RuntimeError:
            continue
