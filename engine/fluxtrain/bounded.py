"""Bounds what a model's folder brings to run: its chat template and its tokenizer are programs that
need not end, and may take any amount of memory.

One thread watches. Python code that takes too long gets an exception, and native code, which cannot
be interrupted, ends with the process, after its words are told.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from types import TracebackType
from typing import NoReturn

from fluxtrain.errors import BadInput, FluxTrainError
from fluxtrain.units import bytes_text

LIMIT_S = 8.0
BYTES_PER_S = 50_000  # the slowest tokenizers, in pure Python, take several times as many
GROWTH_BYTES = 2 << 30
GROWTH_FACTOR = 512  # of the bytes that are given: fast tokenizers take up to 300 for one
GRACE_S = 2.0  # for an exception to be noticed
MEMORY_GRACE_S = 0.2
PERIOD_S = 0.05
_PANIC = "PanicException"  # of libraries in Rust; no Exception, and of no module to import


class _Exceeded(BaseException):
    """Raised in the thread that takes too long; nothing that catches Exception stops it."""


@dataclass(eq=False)
class within:  # noqa: N801 - reads as a sentence: with within(...)
    """A context in which `what` runs on `given_bytes` of text within time and memory.

    Raises BadInput, with `cure`, where it does not end, takes too much memory or panics. Where
    native code cannot be interrupted the process ends with BadInput's exit code, once `last_words`
    were called.
    """

    what: str
    given_bytes: int = 0
    cure: str = "repair it in the model's folder"
    limit_s: float | None = None  # None: LIMIT_S
    _thread: int = field(default_factory=threading.get_ident)
    spent_s: float = 0.0
    base_bytes: int | None = None
    exceeded: str = ""  # what, in words
    told_s: float = 0.0

    @property
    def allowed_s(self) -> float:
        """Return how long it may take."""
        return (LIMIT_S if self.limit_s is None else self.limit_s) + self.given_bytes / BYTES_PER_S

    @property
    def allowed_bytes(self) -> int:
        """Return by how much memory may grow."""
        return GROWTH_BYTES + GROWTH_FACTOR * self.given_bytes

    def __enter__(self) -> within:
        _watch.begin(self)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            _watch.end(self)
        except _Exceeded:  # it came a moment too late
            _watch.end(self)
        if self.exceeded:
            raise self.refusal() from None
        if error is not None and is_panic(error) and "ThreadPool" not in str(error):
            words = str(error).strip().splitlines()
            raise BadInput(
                f"{self.what} failed ({words[0] if words else 'without a word'}): {self.cure}"
            ) from error

    def refusal(self) -> BadInput:
        """Return what is wrong with it, in words."""
        on = f" on {bytes_text(self.given_bytes)} of text" if self.given_bytes else ""
        return BadInput(f"{self.what} {self.exceeded}{on}: {self.cure}")


def is_panic(error: BaseException) -> bool:
    """Return whether a library in Rust failed in a way that it did not foresee: `except Exception`
    passes it over."""
    return type(error).__name__ == _PANIC


class _Watch:
    """The thread that watches, and what runs now. It is started with the first that runs."""

    def __init__(self) -> None:
        self.last_words: Callable[[FluxTrainError], None] = lambda refusal: None
        self.reset()
        os.register_at_fork(after_in_child=self.reset)

    def reset(self) -> None:
        """Watch nothing; a forked process has no thread of its parent."""
        self.running: dict[int, within] = {}
        self._lock = threading.Lock()
        self._busy = threading.Event()
        self._started = False

    def begin(self, one: within) -> None:
        if not self._started:
            threading.Thread(target=self._watch, name="bounded", daemon=True).start()
            self._started = True
        self.running[id(one)] = one
        if not self._busy.is_set():
            self._busy.set()

    def end(self, one: within) -> None:
        with self._lock:
            self.running.pop(id(one), None)
            if one.exceeded:  # the exception may still be on its way
                _raise_in(one._thread, None)

    def _watch(self) -> None:
        while True:
            if not self.running:
                self._busy.clear()
                if not self.running:
                    self._busy.wait()
            before_s = time.monotonic()
            time.sleep(PERIOD_S)
            # A process that was stopped has not worked meanwhile.
            passed_s = min(time.monotonic() - before_s, 4 * PERIOD_S)
            held_bytes = resident_bytes()
            for one in list(self.running.values()):
                self._look_at(one, passed_s, held_bytes)

    def _look_at(self, one: within, passed_s: float, held_bytes: int) -> None:
        one.spent_s += passed_s
        if one.base_bytes is None:
            one.base_bytes = held_bytes
        grown_bytes = held_bytes - one.base_bytes
        if not one.exceeded:
            if one.spent_s > one.allowed_s:
                one.exceeded, one.told_s = f"did not end within {one.allowed_s:.0f} s", GRACE_S
            elif grown_bytes > one.allowed_bytes:
                took = f"took more than {bytes_text(one.allowed_bytes)} of memory"
                one.exceeded, one.told_s = took, MEMORY_GRACE_S
            else:
                return
            with self._lock:
                if id(one) in self.running:
                    _raise_in(one._thread, _Exceeded)
            return
        one.told_s -= passed_s
        if one.told_s < 0 and id(one) in self.running:
            end_process(one.refusal())


_watch = _Watch()


def at_fault() -> BadInput | None:
    """Return what is wrong with a model's folder where its part runs in this thread, or in any, and
    the process is about to end by it; None where nothing of a model runs."""
    found = list(_watch.running.values())
    mine = [one for one in found if one._thread == threading.get_ident()]
    for one in (*mine, *found):
        one.exceeded = "made a native library abort"
        return one.refusal()
    return None


def end_process(refusal: FluxTrainError) -> NoReturn:
    """End the process at once with the words and the exit code of `refusal`, which is recorded
    where `tell_last_words_to` says; that takes at most GRACE_S."""
    try:
        sys.stderr.write(f"error: {' '.join(str(refusal).split())}\n")
        sys.stderr.flush()
        telling = threading.Thread(target=_watch.last_words, args=(refusal,), daemon=True)
        try:
            telling.start()
            telling.join(GRACE_S)  # what it needs may be held by what never ends
        except RuntimeError:  # the system refuses another thread
            signal.setitimer(signal.ITIMER_REAL, GRACE_S)  # ends the process
            _watch.last_words(refusal)
    finally:
        os._exit(refusal.exit_code)


def tell_last_words_to(told: Callable[[FluxTrainError], None] | None) -> None:
    """Let `told` record why the process ends at once, in the watching thread; None: nobody."""
    _watch.last_words = told or (lambda refusal: None)


def _raise_in(thread: int, kind: type[BaseException] | None) -> None:
    """Raise an exception in a thread at its next instruction; None takes it back."""
    raised = None if kind is None else ctypes.py_object(kind)
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), raised)


def resident_bytes() -> int:
    """Return the memory that this process holds, swapped or not; 0 where it is not told.

    Source: proc(5), VmRSS and VmSwap of /proc/PID/status.
    """
    found = 0
    try:
        with open("/proc/self/status", "rb") as file:
            for line in file:
                if line.startswith((b"RssAnon:", b"VmSwap:")):
                    found += int(line.split()[1]) << 10
    except (OSError, ValueError, IndexError):
        return 0
    return found
