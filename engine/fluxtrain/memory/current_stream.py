"""The stream that a GPU's computation is queued on, asked for several times a block."""

from __future__ import annotations

import torch


class CurrentStream:
    """As `torch.cuda.current_stream(device)`, which makes an object and looks the device up each
    time: that takes as long as recording the event that it is asked for."""

    def __init__(self, device: torch.device) -> None:
        index: int | None = device.index
        self._index = torch.cuda.current_device() if index is None else index
        self._known: dict[tuple[int, int, int], torch.cuda.Stream] = {}

    def __call__(self) -> torch.cuda.Stream:
        """The stream that this thread queues on now."""
        numbers: tuple[int, int, int] = torch._C._cuda_getCurrentStream(self._index)
        stream = self._known.get(numbers)
        if stream is None:
            stream_id, index, kind = numbers
            stream = torch.cuda.Stream(stream_id=stream_id, device_index=index, device_type=kind)
            self._known[numbers] = stream
        return stream
