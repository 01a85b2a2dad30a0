"""Copies that keep the bus and one thread busy, as a training does beside the optimizer."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from fluxtrain.units import MIB

COPY_BYTES = 64 * MIB


@contextmanager
def busy_bus(device: str) -> Iterator[None]:
    """Page-locked memory goes up to a GPU and comes down again inside; on another device nothing.

    The thread that queues the copies waits for them as a training's does, on a core of its own.
    """
    if device != "cuda":
        yield
        return
    import torch

    up, down = (torch.zeros(COPY_BYTES, dtype=torch.uint8).pin_memory() for _ in range(2))
    on_device = torch.zeros(COPY_BYTES, dtype=torch.uint8, device=device)
    stopped = threading.Event()

    def copy() -> None:
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            while not stopped.is_set():
                on_device.copy_(up, non_blocking=True)
                down.copy_(on_device, non_blocking=True)
                stream.synchronize()

    thread = threading.Thread(target=copy, name="busy-bus", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stopped.set()
        thread.join()
