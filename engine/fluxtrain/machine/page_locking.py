"""The limit of page-locked memory in words, and what a refused lock leaves behind in CUDA."""

from __future__ import annotations

import resource

from fluxtrain.units import bytes_text


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
