"""Samples of this machine from psutil and NVML, taken by the app itself."""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable
from types import ModuleType
from typing import TypeVar

import psutil

from fluxtui.state.machine import GpuSample, MachineSample

Value = TypeVar("Value")


class MachineSampler:
    """`sample` costs about a millisecond and never raises; what cannot be measured is None."""

    def __init__(self) -> None:
        self._gpu = _GpuReader()
        self._trainer: psutil.Process | None = None
        psutil.cpu_percent()  # the first call only sets the start of the interval

    def sample(self, trainer_pid: int | None = None) -> MachineSample:
        """The machine since the last call; `trainer_pid` adds that process and its children."""
        memory = psutil.virtual_memory()
        rss_bytes, cores_used = self._trainer_use(trainer_pid)
        return MachineSample(
            wall_s=time.time(),
            cpu=psutil.cpu_percent() / 100.0,
            cores=psutil.cpu_count() or 1,
            memory_used_bytes=memory.total - memory.available,
            memory_total_bytes=memory.total,
            trainer_rss_bytes=rss_bytes,
            trainer_cpu=cores_used,
            gpu=self._gpu.read(),
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
        except psutil.Error:
            self._trainer = None
            return None, None


class _GpuReader:
    """The first GPU through NVML; silent for good when there is no driver."""

    def __init__(self) -> None:
        self._nvml: ModuleType | None = None
        self._handle: object = None
        try:
            nvml = importlib.import_module("pynvml")
        except ImportError:
            return
        try:
            nvml.nvmlInit()
            self._handle = nvml.nvmlDeviceGetHandleByIndex(0)
            self._nvml = nvml
        except nvml.NVMLError:
            return

    def read(self) -> GpuSample | None:
        """One sample, None without a GPU."""
        nvml = self._nvml
        if nvml is None:
            return None
        memory = self._asked(lambda: nvml.nvmlDeviceGetMemoryInfo(self._handle))
        rates = self._asked(lambda: nvml.nvmlDeviceGetUtilizationRates(self._handle))
        power_mw = self._asked(lambda: nvml.nvmlDeviceGetPowerUsage(self._handle))
        limit_mw = self._asked(lambda: nvml.nvmlDeviceGetEnforcedPowerLimit(self._handle))
        heat_c = self._asked(lambda: nvml.nvmlDeviceGetTemperature(self._handle, 0))
        name = self._asked(lambda: nvml.nvmlDeviceGetName(self._handle))
        return GpuSample(
            name=str(name or "GPU"),
            utilisation=None if rates is None else rates.gpu / 100.0,
            memory_used_bytes=None if memory is None else int(memory.used),
            memory_total_bytes=None if memory is None else int(memory.total),
            power_w=None if power_mw is None else power_mw / 1000.0,
            power_limit_w=None if limit_mw is None else limit_mw / 1000.0,
            temperature_c=None if heat_c is None else float(heat_c),
        )

    def _asked(self, question: Callable[[], Value]) -> Value | None:
        assert self._nvml is not None
        try:
            return question()
        except self._nvml.NVMLError:
            return None  # this card does not tell
