"""Which GPU a worker of the tests takes first."""

from __future__ import annotations

import os

import pynvml


def own_gpu_first(worker: int) -> dict[str, str]:
    """The variable that lets a worker see all GPUs, another one first than its neighbour does."""
    if "CUDA_VISIBLE_DEVICES" in os.environ:
        return {}
    try:
        pynvml.nvmlInit()
        count = pynvml.nvmlDeviceGetCount()
    except pynvml.NVMLError:
        return {}
    order = [str((worker + place) % count) for place in range(count)]
    return {"CUDA_VISIBLE_DEVICES": ",".join(order)} if count > 1 else {}
