"""Reads or writes several files, or parts of one, at once."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from itertools import count
from typing import TypeVar

THREADS = 4

T = TypeVar("T")
R = TypeVar("R")


def several_at_once(
    work: Callable[[int, T], R], items: Iterable[T], threads: int = THREADS
) -> list[R]:
    """Do `work` with the number of each item, from 0, and the item, on up to `threads` threads,
    this one among them; on fewer where the system refuses one. Returns the results in order.

    An item is taken from the iterable, by one thread at a time, once a thread is free for it. After
    an error no further item is taken; the error is raised once all threads have ended.
    """
    lock, numbers, left = threading.Lock(), count(), iter(items)
    results: dict[int, R] = {}
    errors: list[BaseException] = []

    def run() -> None:
        try:
            while not errors:
                with lock:
                    number, item = next(numbers), next(left)
                results[number] = work(number, item)
                del item  # or its memory would stay while this thread waits for the next one
        except StopIteration:
            return
        except BaseException as error:  # noqa: BLE001 - raised below
            errors.append(error)

    started: list[threading.Thread] = []
    try:
        with suppress(RuntimeError):  # a limit of threads
            for number in range(1, threads):
                thread = threading.Thread(target=run, name=f"file-{number}")
                thread.start()
                started.append(thread)
        run()
        for thread in started:
            thread.join()
    except BaseException as error:  # a signal: the other threads take nothing more
        errors.append(error)
        raise
    if errors:
        raise errors[0]
    return [results[number] for number in sorted(results)]
