"""Writes the lanes of each step into the run's ring while it trains."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path

from fluxtrain.core.device.recorder import Recorder
from fluxtrain.errors import BadInput
from fluxtrain.events.trace.lanes import StepLanes
from fluxtrain.events.trace.ring import RingWriter
from fluxtrain.train.observe.step_cutter import StepCutter

PERIOD_S = 0.25
RECENT_STEPS = 20
_LAST_WORDS_S = 2.0  # work that the device has not done by then is left out


class TimelineThread:
    """Runs between `watch` and `close`; the trainer's own threads never wait for it.

    A ring that cannot be written is reported once; the run goes on without it.
    """

    def __init__(self, path: Path, warn: Callable[[str], None]) -> None:
        self.path = path
        self._warn = warn
        self._recorder: Recorder | None = None
        self._cutter: StepCutter | None = None
        self._ring: RingWriter | None = None
        self.recent: deque[StepLanes] = deque(maxlen=RECENT_STEPS)  # read by any thread
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="timeline", daemon=True)

    def watch(self, recorder: Recorder) -> None:
        """Write what `recorder` notes from now on."""
        self._recorder = recorder
        try:
            self._ring = RingWriter(self.path)
        except (OSError, BadInput) as error:
            self._give_up(error)
            return
        self._cutter = StepCutter(recorder)
        self._thread.start()

    def close(self) -> None:
        """Write the remaining steps; the ring ends with the last whole step."""
        if self._recorder is None or self._ring is None or self._stopped.is_set():
            return
        self._recorder.end_step()
        self._stopped.set()
        if self._thread.ident is not None:  # the system may have refused another thread
            self._thread.join()
        until_s = time.monotonic() + _LAST_WORDS_S
        while self._recorder.notes and time.monotonic() < until_s:
            self._keep()
            time.sleep(0.001)
        self._keep(final=True)
        self._recorder.stop()
        if self._ring is not None:
            self._ring.close()

    def _run(self) -> None:
        while not self._stopped.wait(PERIOD_S):
            self._keep()

    def _keep(self, *, final: bool = False) -> None:
        if self._cutter is None or self._ring is None:
            return
        try:
            for step in self._cutter.ready(final=final):
                self._ring.write(step)
                self.recent.append(step)
        except Exception as error:  # noqa: BLE001 - what watches a training must not end it
            self._give_up(error)

    def _give_up(self, error: Exception) -> None:
        if self._recorder is not None:
            self._recorder.stop()
        if self._ring is not None:
            self._ring.close()
            self._ring = None
        why = f"{type(error).__name__}: {error}"
        if isinstance(error, OSError | BadInput):
            why = getattr(error, "strerror", None) or str(error)
        self._warn(f"the step timeline is not kept: {self.path.name}: {why}; the training goes on")
