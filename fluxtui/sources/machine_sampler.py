"""Samples this machine by psutil and NVML, in a thread of the app."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import psutil

from fluxtui.sources.gpu import GpuReader
from fluxtui.state.machine_sample import MachineSample

PERIOD_S = 1.0


def watch(
    say: Callable[[MachineSample], None],
    stop: threading.Event,
    trainer_pid: Callable[[], int | None],
    sampler: MachineSampler | None = None,
) -> None:
    """Call `say` with a sample every second, with a run or without one, until `stop`."""
    sampler = sampler or MachineSampler()
    while True:
        say(sampler.sample(trainer_pid()))
        if stop.wait(PERIOD_S):
            return


class MachineSampler:
    """Samples in about a millisecond, without raising; None for what cannot be measured."""

    def __init__(self) -> None:
        self._gpus = GpuReader()
        self._trainer: psutil.Process | None = None
        psutil.cpu_percent()  # the first call only sets the start of the interval

    def sample(self, trainer_pid: int | None = None) -> MachineSample:
        """Return the load since the last call; `trainer_pid` adds that process and its children."""
        memory = psutil.virtual_memory()
        rss_bytes, cores_used = self._trainer_use(trainer_pid)
        return MachineSample(
            monotonic_s=time.monotonic(),
            cpu=psutil.cpu_percent() / 100.0,
            cores=psutil.cpu_count() or 1,
            memory_used_bytes=memory.total - memory.available,
            memory_total_bytes=memory.total,
            trainer_rss_bytes=rss_bytes,
            trainer_cpu=cores_used,
            gpus=self._gpus.read(trainer_pid),
        )

    def _trainer_use(self, pid: int | None) -> tuple[int | None, float | None]:
        if pid is None:
            return None, None
        try:
            if self._trainer is None or self._trainer.pid != pid:
                self._trainer = psutil.Process(pid)
                self._trainer.cpu_percent()
                return self._trainer.memory_info().rss, None
            return self._trainer.memory_info().rss, self._trainer.cpu_percent() / 100.0
        except (psutil.Error, ValueError, OverflowError):  # no number that a process can have
            self._trainer = None
            return None, None
