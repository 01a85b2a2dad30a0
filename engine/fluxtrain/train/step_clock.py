"""Where the time of one step goes, without a host synchronisation of its own."""

from __future__ import annotations

import time

import torch

from fluxtrain.memory.recorder import Recorder

PHASES = ("data", "forward", "backward", "optimizer", "other")


class StepClock:
    """Marks the ends of phases; on CUDA the border of forward and backward is timed on the device.

    The host runs ahead of the device, so its clock cannot see where forward ends. The loop reads
    the gradient norm after the backward pass, which waits for the device; the wall time up to there
    is then divided as the device's own events say.
    """

    def __init__(self, device: torch.device, recorder: Recorder | None = None) -> None:
        self._recorder = recorder
        self._stream = torch.cuda.current_stream(device) if device.type == "cuda" else None
        self._spent_s = dict.fromkeys(PHASES, 0.0)
        self._events: list[tuple[str, torch.cuda.Event]] = []
        self._started_s = self._last_s = time.perf_counter()

    def ends(self, phase: str) -> None:
        """`phase` ended now; time since the previous mark is its."""
        now = time.perf_counter()
        if self._recorder is not None:
            self._recorder.host_did(phase, self._last_s, now)
        self._spent_s[phase] += now - self._last_s
        self._last_s = now
        if self._stream is not None and phase in ("data", "forward", "backward"):
            event = torch.cuda.Event(enable_timing=True)
            event.record(self._stream)
            self._events.append((phase, event))

    def finish(self) -> tuple[float, dict[str, float]]:
        """The seconds of the step and its partition; call it after the device was waited for."""
        total_s = time.perf_counter() - self._started_s
        spent = dict(self._spent_s)
        if self._events:
            both_s = spent["forward"] + spent["backward"]
            spent["forward"] = min(both_s, self._forward_on_device_s())
            spent["backward"] = both_s - spent["forward"]
        spent["other"] += max(0.0, total_s - sum(spent.values()))
        return total_s, spent

    def _forward_on_device_s(self) -> float:
        pairs = zip(self._events, self._events[1:], strict=False)
        milliseconds = [
            start.elapsed_time(end) for (_, start), (phase, end) in pairs if phase == "forward"
        ]
        return float(sum(milliseconds)) / 1e3
