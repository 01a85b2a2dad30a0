"""The GPU and the stream that this thread queues work on, asked for several times a block."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

_HERE: AbstractContextManager[object] = nullcontext()


class CurrentStream:
    """Look up `torch.cuda.current_stream(device)` without making an object and finding the device
    each time, which takes as long as recording the event that the stream is asked for."""

    def __init__(self, device: torch.device) -> None:
        index: int | None = device.index
        self._index = torch.cuda.current_device() if index is None else index
        self._known: dict[tuple[int, int, int], torch.cuda.Stream] = {}

    def __call__(self) -> torch.cuda.Stream:
        """Return the stream that this thread queues on now."""
        numbers: tuple[int, int, int] = torch._C._cuda_getCurrentStream(self._index)
        stream = self._known.get(numbers)
        if stream is None:
            stream_id, index, kind = numbers
            stream = torch.cuda.Stream(stream_id=stream_id, device_index=index, device_type=kind)
            self._known[numbers] = stream
        return stream


def launching_on(tensor: Tensor) -> AbstractContextManager[object]:
    """Launch Triton kernels inside on the tensor's GPU, and on the stream that is current there.

    torch's operations choose the GPU of their tensors themselves; a Triton kernel is launched on
    the current GPU wherever its tensors are. Where both are the same, as almost always, this costs
    one comparison.
    """
    index = tensor.get_device()
    if index < 0 or index == torch._C._cuda_getDevice():
        return _HERE
    return torch.cuda.device(index)
