"""One thread that does jobs in order and holds on to none of them.

An executor's thread keeps a job, and with it a whole model, for a moment after its waiters were
woken. A model that is dropped in that moment would be freed late, and on that thread.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, TypeVar

T = TypeVar("T")


class Worker:
    """Does what is submitted, in order, on a thread called `name`; ends when it is dropped.

    `when_idle` is called on that thread after a job behind which no other waits.
    """

    def __init__(self, name: str, when_idle: Callable[[], None] | None = None) -> None:
        self._pool = ThreadPoolExecutor(1, thread_name_prefix=name)
        self._left = _Left(when_idle)

    def submit(self, work: Callable[[], T]) -> Future[T]:
        """Queue `work`. When the result can be had, nothing refers to `work` any more."""
        self._left.one_more()
        return self._pool.submit(_Once(work, self._left))

    def unless_here(self, wait: Callable[[], None]) -> None:
        """`wait` for a job, but not on the thread that does it; a job holds what it needs."""
        if self._left.thread != threading.get_ident():
            wait()

    def close(self) -> None:
        """Finish what is queued and end the thread."""
        self._pool.shutdown(wait=True)


class _Left:
    """How many jobs were submitted and not done."""

    def __init__(self, when_idle: Callable[[], None] | None) -> None:
        self._when_idle = when_idle
        self._jobs = 0
        self._lock = threading.Lock()
        self.thread: int | None = None  # that does them

    def one_more(self) -> None:
        with self._lock:
            self._jobs += 1

    def one_less(self) -> None:
        with self._lock:
            self._jobs -= 1
            idle = self._jobs == 0
        if idle and self._when_idle is not None:
            self._when_idle()


class _Once(Generic[T]):
    def __init__(self, work: Callable[[], T], left: _Left) -> None:
        self._work: list[Callable[[], T]] = [work]
        self._left = left

    def __call__(self) -> T:
        self._left.thread = threading.get_ident()
        try:
            return self._work.pop()()
        finally:
            self._left.one_less()
