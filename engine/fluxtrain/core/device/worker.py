"""One thread that runs jobs in order and keeps no reference to them.

A thread of `ThreadPoolExecutor` refers to a job, and through it to a whole model, for a moment
after it woke the job's waiters. A model dropped in that moment would be freed late, and there.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, Protocol, TypeVar

T = TypeVar("T")


class Job(Protocol):
    """Work that can be waited for, like a `Future` without a value."""

    def result(self) -> None:
        """Wait for its end; raise the error of a failed job."""

    def done(self) -> bool:
        """Return whether it has ended."""


class Worker:
    """Runs submitted jobs in order on a thread called `name`; the thread ends with this object.

    `when_idle` is called on that thread after a job when no other job is queued.
    """

    def __init__(self, name: str, when_idle: Callable[[], None] | None = None) -> None:
        self._pool = ThreadPoolExecutor(1, thread_name_prefix=name)
        self._unfinished = _Unfinished(when_idle)

    def submit(self, work: Callable[[], T]) -> Future[T]:
        """Queue `work`. Once it has run, nothing refers to it any more."""
        self._unfinished.one_more()
        return self._pool.submit(_Once(work, self._unfinished))

    def close(self) -> None:
        """Finish what is queued and end the thread."""
        self._pool.shutdown(wait=True)


class _Unfinished:
    """Counts the jobs that were submitted and are not done."""

    def __init__(self, when_idle: Callable[[], None] | None) -> None:
        self._when_idle = when_idle
        self._jobs = 0
        self._lock = threading.Lock()

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
    def __init__(self, work: Callable[[], T], unfinished: _Unfinished) -> None:
        self._work: list[Callable[[], T]] = [work]
        self._unfinished = unfinished

    def __call__(self) -> T:
        try:
            return self._work.pop()()
        finally:
            self._unfinished.one_less()
