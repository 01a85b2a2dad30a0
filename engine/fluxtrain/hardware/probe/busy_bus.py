"""Copies over the bus beside an optimizer's update, as many as a training has there."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, NamedTuple

from fluxtrain.hardware.probe.pinning import page_locked
from fluxtrain.units import MIB

if TYPE_CHECKING:
    from torch import Tensor

COPY_BYTES = 64 * MIB  # at a time


class HostBytes(NamedTuple):
    """A range of this process's memory."""

    address: int
    size_bytes: int


@contextmanager
def busy_bus(*, up: HostBytes | None, down: HostBytes | None) -> Iterator[Callable[[], None]]:
    """Gives what is called as each update begins: `up` then goes to the GPU and `down` comes from
    it, whole. Both are page-locked meanwhile, where the system grants that.

    They should be what the update writes and reads, as in a training: a buffer of its own would
    stay in the processor's caches, and the copies would take nothing of the host's memory.
    The thread that queues the copies waits for them as a training's does, on a core of its own.
    Copies that an update leaves unfinished go on beside the next one, in place of its own.
    """
    if up is None and down is None:
        yield lambda: None
        return
    import torch

    def copy() -> None:
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            while asked.wait() and not closing.is_set():
                asked.clear()
                for host, here in both.items():
                    for piece in here.split(COPY_BYTES):
                        there = buffers[host][: piece.numel()]
                        target, source = (there, piece) if host is up else (piece, there)
                        target.copy_(source, non_blocking=True)
                        stream.synchronize()

    asked, closing = threading.Event(), threading.Event()
    with ExitStack() as locks:
        both = {host: _as_tensor(host) for host in (up, down) if host is not None}
        buffers = {host: torch.zeros(COPY_BYTES, dtype=torch.uint8, device="cuda") for host in both}
        torch.cuda.synchronize()
        for host in both:
            locks.enter_context(page_locked(*host))
        thread = threading.Thread(target=copy, name="busy-bus", daemon=True)
        thread.start()
        try:
            yield asked.set
        finally:
            closing.set()
            asked.set()
            thread.join()


def _as_tensor(host: HostBytes) -> Tensor:
    import torch

    memory = (ctypes.c_char * host.size_bytes).from_address(host.address)
    return torch.frombuffer(memory, dtype=torch.uint8)
