"""Seconds that the computation waited, by cause."""

from __future__ import annotations

import threading
from collections import deque
from typing import Any

from fluxtrain.core.device.recorder import HostClock, Recorder


class Stalls:
    """Seconds that the computation waited, by cause; read and reset by `take`."""

    def __init__(self, recorder: Recorder | None = None) -> None:
        self._recorder = recorder or Recorder(HostClock())
        self._seconds: dict[str, float] = {}
        self._pairs: deque[tuple[str, Any, Any]] = deque()
        self._lock = threading.Lock()

    def add(self, cause: str, seconds: float) -> None:
        """Count `seconds` until now in which the thread that drives the computation waited."""
        self._recorder.host_waited(cause, seconds)
        self._book(cause, seconds)

    def add_host(self, cause: str, seconds: float) -> None:
        """Record that this thread waited; count it as a stall only where it is the computation (a
        GPU may have gone on meanwhile)."""
        self._recorder.host_waited(cause, seconds)
        if self._recorder.clock.on_host:
            self._book(cause, seconds)

    def add_events(self, cause: str, before: Any, after: Any) -> None:
        """Count the time between two CUDA events once both have passed."""
        self._recorder.stalled(cause, before, after)
        self._pairs.append((cause, before, after))

    def take(self) -> dict[str, float]:
        """Return seconds by cause since the last call; later events stay for the next one."""
        while self._pairs and self._pairs[0][2].query():
            cause, before, after = self._pairs.popleft()
            self._book(cause, before.elapsed_time(after) / 1e3)
        with self._lock:
            taken, self._seconds = self._seconds, {}
        return taken

    def _book(self, cause: str, seconds: float) -> None:
        with self._lock:
            self._seconds[cause] = self._seconds.get(cause, 0.0) + seconds
