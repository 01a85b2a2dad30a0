"""Samples this machine: its processor and memory, the trainer, and the GPUs by NVML."""

from __future__ import annotations

import importlib
import threading
import time
from collections.abc import Callable, Iterable
from types import ModuleType
from typing import Any

import psutil

from fluxtrain.events.printable import printable
from fluxtui.state.machine_sample import GpuSample, GpuUser, MachineSample

# Bits of nvmlDeviceGetCurrentClocksEventReasons (nvml.h). Idle (0x1), clocks that the user set
# (0x2, 0x100) and sync boost (0x10) are no throttling.
THROTTLING = {
    0x4: "power limit",
    0x8: "hardware slowdown",
    0x20: "heat",
    0x40: "heat (hardware)",
    0x80: "power brake",
}


class GpuReader:
    """Samples every GPU with `read`, which never raises; without a driver it finds none."""

    def __init__(self) -> None:
        self._cards: tuple[_Card, ...] = ()
        try:
            nvml = importlib.import_module("pynvml")
        except ImportError:
            return
        try:
            nvml.nvmlInit()
            count = int(nvml.nvmlDeviceGetCount())
        except nvml.NVMLError:
            return
        self._cards = tuple(card for i in range(count) if (card := _card(nvml, i)) is not None)

    def read(self, trainer_pid: int | None = None) -> tuple[GpuSample, ...]:
        """Return one sample a GPU, in the driver's order; () without any."""
        return tuple(card.read(trainer_pid) for card in self._cards)


def _card(nvml: ModuleType, index: int) -> _Card | None:
    """Read one GPU; None where that fails, as for one that fell off its bus."""
    try:
        return _Card(nvml, index, nvml.nvmlDeviceGetHandleByIndex(index))
    except nvml.NVMLError:
        return None


class _Card:
    """One GPU and the questions to NVML about it."""

    def __init__(self, nvml: ModuleType, index: int, handle: object) -> None:
        self._nvml, self._index, self._handle = nvml, index, handle

    def read(self, trainer_pid: int | None) -> GpuSample:
        """Return its sample; None for a value that NVML does not tell."""
        ask = self._asked
        memory = ask("nvmlDeviceGetMemoryInfo")
        rates = ask("nvmlDeviceGetUtilizationRates")
        heat_c = ask("nvmlDeviceGetTemperature", 0)
        name = ask("nvmlDeviceGetName")
        return GpuSample(
            name=text_of(name) or "GPU",
            index=self._index,
            utilisation=None if rates is None else rates.gpu / 100.0,
            memory_used_bytes=None if memory is None else int(memory.used),
            memory_total_bytes=None if memory is None else int(memory.total),
            power_w=_thousandth(ask("nvmlDeviceGetPowerUsage")),
            power_limit_w=_thousandth(ask("nvmlDeviceGetEnforcedPowerLimit")),
            temperature_c=None if heat_c is None else float(heat_c),
            clock_mhz=ask("nvmlDeviceGetClockInfo", 1),  # NVML_CLOCK_SM
            clock_limit_mhz=ask("nvmlDeviceGetMaxClockInfo", 1),
            memory_clock_mhz=ask("nvmlDeviceGetClockInfo", 2),  # NVML_CLOCK_MEM
            throttled_by=self._throttled_by(),
            processes=self._processes(trainer_pid),
        )

    def _throttled_by(self) -> tuple[str, ...] | None:
        bits = self._asked("nvmlDeviceGetCurrentClocksEventReasons")
        if bits is None:  # older drivers know it by its former name
            bits = self._asked("nvmlDeviceGetCurrentClocksThrottleReasons")
        return None if bits is None else throttling(int(bits))

    def _processes(self, trainer_pid: int | None) -> tuple[GpuUser, ...] | None:
        computing = self._asked("nvmlDeviceGetComputeRunningProcesses")
        drawing = self._asked("nvmlDeviceGetGraphicsRunningProcesses")
        if computing is None and drawing is None:
            return None
        return processes_of([*(computing or ()), *(drawing or ())], trainer_pid, name_of)

    def _asked(self, name: str, *arguments: object) -> Any:
        """Return NVML's answer; None if the card, the driver or the library has none."""
        question = getattr(self._nvml, name, None)
        if question is None:
            return None
        try:
            return question(self._handle, *arguments)
        except self._nvml.NVMLError:
            return None


def text_of(value: object) -> str:
    """Decode a text of the driver; older libraries give bytes."""
    text = value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value or "")
    return printable(text)


def throttling(bits: int) -> tuple[str, ...]:
    """Say what throttles the clocks; () at full speed."""
    return tuple(word for bit, word in THROTTLING.items() if bits & bit)


def processes_of(
    found: Iterable[Any], trainer_pid: int | None, name: Callable[[int], str]
) -> tuple[GpuUser, ...]:
    """Return NVML's processes, each once, the largest first."""
    by_pid: dict[int, int | None] = {}
    for one in found:
        used = one.usedGpuMemory
        by_pid[one.pid] = max(by_pid.get(one.pid) or 0, used) if used is not None else None
    ordered = sorted(by_pid.items(), key=lambda item: -(item[1] or 0))
    return tuple(
        GpuUser(pid=pid, name=name(pid), memory_bytes=used or None, is_trainer=pid == trainer_pid)
        for pid, used in ordered
    )


def name_of(pid: int) -> str:
    """Return the name of a process; "" if it is hidden from us."""
    try:
        return printable(psutil.Process(pid).name())
    except (psutil.Error, ValueError, OverflowError):
        return ""


def _thousandth(value: int | None) -> float | None:
    return None if value is None else value / 1000.0


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
