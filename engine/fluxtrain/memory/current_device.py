"""The GPU that this thread launches kernels on, which Triton does not take from their tensors."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

_HERE: AbstractContextManager[object] = nullcontext()


def launching_on(tensor: Tensor) -> AbstractContextManager[object]:
    """Within it kernels go to the tensor's GPU and to the stream that is current there.

    Torch's operations look after that themselves; a Triton kernel is launched on the current GPU
    wherever its tensors are. Where that is theirs, as almost always, this costs one comparison.
    """
    index = tensor.get_device()
    if index < 0 or index == torch._C._cuda_getDevice():
        return _HERE
    return torch.cuda.device(index)
