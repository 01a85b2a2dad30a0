"""Measure where the time of one step goes, and estimate how long the remaining ones take."""

from __future__ import annotations

import math
import time
from collections import deque
from statistics import fmean, pvariance

import torch

from fluxtrain.core.device.recorder import Recorder

RECENT_STEPS = 50
_WARM_UP_STEPS = 1  # the first step of a process builds caches and probes; it predicts nothing
PHASES = ("data", "forward", "backward", "optimizer", "other")


class StepClock:
    """Marks the ends of phases; on CUDA the device's own events time forward and backward.

    On CUDA the host runs up to a step ahead of the device. So a step lasts, by the device's events,
    from the end of the previous step, and a phase of the host counts only while the device is idle.
    """

    def __init__(self, device: torch.device, recorder: Recorder | None = None) -> None:
        self._recorder = recorder
        self._stream = torch.cuda.current_stream(device) if device.type == "cuda" else None
        self._spent_s = dict.fromkeys(PHASES, 0.0)
        self._events: list[tuple[str, torch.cuda.Event]] = []
        self._started_s = self._last_s = time.perf_counter()

    def ends(self, phase: str) -> None:
        """Note that `phase` ended now; the time since the previous mark belongs to it."""
        now = time.perf_counter()
        if self._recorder is not None:
            self._recorder.host_did(phase, self._last_s, now)
        self._spent_s[phase] += now - self._last_s
        self._last_s = now
        if self._stream is not None and phase in ("data", "forward", "backward"):
            event = torch.cuda.Event(enable_timing=True)
            event.record(self._stream)
            self._events.append((phase, event))

    def finish(self, before: StepClock | None = None) -> tuple[float, dict[str, float]]:
        """Return the step's seconds and their partition; wait for the device before the call.

        before: the clock of the previous step, if nothing came in between.
        """
        if self._events:
            earlier = before._events[-1] if before is not None and before._events else None
            (_, start), (_, end) = earlier or self._events[0], self._events[-1]
            end.synchronize()  # it precedes the norm, which has arrived
            total_s = start.elapsed_time(end) / 1e3
            return total_s, self._divided(total_s)
        total_s = time.perf_counter() - self._started_s
        spent = dict(self._spent_s)
        spent["other"] += max(0.0, total_s - sum(spent.values()))
        return total_s, spent

    def _divided(self, total_s: float) -> dict[str, float]:
        device = {phase: self._on_device_s(phase) for phase in ("forward", "backward")}
        squeeze = min(1.0, total_s / max(sum(device.values()), 1e-9))
        spent = dict.fromkeys(PHASES, 0.0)
        left_s = total_s
        for phase, seconds in device.items():
            spent[phase] = seconds * squeeze
            left_s -= spent[phase]
        for phase in ("data", "optimizer"):
            spent[phase] = max(0.0, min(self._spent_s[phase], left_s))
            left_s -= spent[phase]
        spent["other"] = max(0.0, left_s)
        return spent

    def _on_device_s(self, phase: str) -> float:
        pairs = zip(self._events, self._events[1:], strict=False)
        milliseconds = [
            start.elapsed_time(end) for (_, start), (ended, end) in pairs if ended == phase
        ]
        return float(sum(milliseconds)) / 1e3


class RecentSteps:
    """Recent step times of this process; a resumed run starts with none."""

    def __init__(self, recent_steps: int = RECENT_STEPS) -> None:
        self._recent_s: deque[float] = deque(maxlen=recent_steps)
        self._seen = 0

    def step_took(self, seconds: float) -> None:
        """Note a step's time, including evaluation and saving since the previous step."""
        self._seen += 1
        if self._seen > _WARM_UP_STEPS:
            self._recent_s.append(seconds)

    def eta(self, remaining_steps: int) -> tuple[float | None, float | None]:
        """Return the seconds left and their standard deviation; None before two steps are known.

        The sum of `n` steps with variance v, whose mean is known from k steps, varies by
        n v + n^2 v / k.
        """
        if remaining_steps == 0:
            return 0.0, 0.0
        known = len(self._recent_s)
        if known < 2:
            return None, None
        variance = pvariance(self._recent_s)
        spread = math.sqrt(remaining_steps * variance + remaining_steps**2 * variance / known)
        return remaining_steps * fmean(self._recent_s), spread
