"""One thread that does jobs in order and holds on to none of them.

An executor's thread keeps a job, and with it a whole model, for a moment after its waiters were
woken. A model that is dropped in that moment would be freed late, and on that thread.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, TypeVar

T = TypeVar("T")


class Worker:
    """Does what is submitted, in order, on a thread called `name`; ends when it is dropped."""

    def __init__(self, name: str) -> None:
        self._pool = ThreadPoolExecutor(1, thread_name_prefix=name)

    def submit(self, work: Callable[[], T]) -> Future[T]:
        """Queue `work`. When the result can be had, nothing refers to `work` any more."""
        return self._pool.submit(_Once(work))

    def close(self) -> None:
        """Finish what is queued and end the thread."""
        self._pool.shutdown(wait=True)


class _Once(Generic[T]):
    def __init__(self, work: Callable[[], T]) -> None:
        self._work: list[Callable[[], T]] = [work]

    def __call__(self) -> T:
        return self._work.pop()()
