"""Several files at once: in order, within bounds, and with fewer threads where some are refused."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from fluxtrain.files.at_once import several_at_once


def test_results_are_in_order_and_no_more_items_are_taken_than_threads_work() -> None:
    taken, done, most = 0, 0, 0
    lock = threading.Lock()

    def items() -> Iterator[str]:
        nonlocal taken
        for letter in "abcdefghijkl":
            taken += 1
            yield letter

    def work(_: int, letter: str) -> str:
        nonlocal most, done
        with lock:
            most = max(most, taken - done)
        threading.Event().wait(0.01)
        with lock:
            done += 1
        return letter * 2

    assert several_at_once(work, items(), threads=3) == [c * 2 for c in "abcdefghijkl"]
    assert most == 3


def test_an_error_is_raised_once_all_ended_and_nothing_more_is_begun() -> None:
    begun: list[int] = []

    def work(number: int, _: int) -> None:
        begun.append(number)
        if number == 1:
            raise OSError(28, "no space left")
        threading.Event().wait(0.05)

    with pytest.raises(OSError, match="no space left"):
        several_at_once(work, range(100), threads=4)
    assert len(begun) <= 8


def test_refused_threads_leave_the_work_to_those_there_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refused(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refused)
    assert several_at_once(lambda number, item: number + item, range(5)) == [0, 2, 4, 6, 8]
