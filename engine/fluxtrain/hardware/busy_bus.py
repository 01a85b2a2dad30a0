"""Copies over the bus beside an optimizer's update, as many as a training has there."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from fluxtrain.units import MIB

COPY_BYTES = 64 * MIB  # at a time


@contextmanager
def busy_bus(
    device: str, *, up_bytes: int = 0, down_bytes: int = 0
) -> Iterator[Callable[[int], None]]:
    """Gives what is called with the number of parameters as each update of them begins: page-locked
    memory then goes up to a GPU, `up_bytes` for each, and comes down. On another device nothing.

    The thread that queues the copies waits for them as a training's does, on a core of its own.
    Copies that an update leaves unfinished go on beside the next one, in place of its own.
    """
    if device != "cuda":
        yield lambda _: None
        return
    import torch

    up, down = (torch.zeros(COPY_BYTES, dtype=torch.uint8).pin_memory() for _ in range(2))
    on_device = torch.zeros(COPY_BYTES, dtype=torch.uint8, device=device)
    lanes = ((on_device, up, up_bytes), (down, on_device, down_bytes))
    asked, closing, parameters = threading.Event(), threading.Event(), [0]

    def copy() -> None:
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            while asked.wait() and not closing.is_set():
                asked.clear()
                for target, source, each in lanes:
                    for start in range(0, each * parameters[0], COPY_BYTES):
                        size = min(COPY_BYTES, each * parameters[0] - start)
                        target[:size].copy_(source[:size], non_blocking=True)
                        stream.synchronize()

    def begins(count: int) -> None:
        parameters[0] = count
        asked.set()

    thread = threading.Thread(target=copy, name="busy-bus", daemon=True)
    thread.start()
    try:
        yield begins
    finally:
        closing.set()
        asked.set()
        thread.join()
