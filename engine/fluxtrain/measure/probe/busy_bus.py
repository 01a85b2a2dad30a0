"""Copies over the bus during an optimizer update, as many as in training."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, NamedTuple

from fluxtrain.machine.page_locking import page_locked
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
    """Yield a function to call as each update begins: it uploads all of `up` and downloads all of
    `down`. Both are page-locked inside the context, if the system grants that.

    They should be the memory that the update writes and reads, as in training: other buffers would
    stay in the processor's caches, and their copies would take no memory bandwidth of the host.
    The thread that queues the copies waits for them as in training, on a core of its own. Copies
    that are unfinished when an update ends continue during the next one, which then starts none.
    """
    if up is None and down is None:
        yield lambda: None
        return
    import torch

    def copy() -> None:
        stream = torch.cuda.Stream(card)  # a new thread's current card is the first one
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
    card = torch.device("cuda", torch.cuda.current_device())
    with ExitStack() as locks:
        both = {host: _as_tensor(host) for host in (up, down) if host is not None}
        buffers = {host: torch.zeros(COPY_BYTES, dtype=torch.uint8, device=card) for host in both}
        torch.cuda.synchronize(card)
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
