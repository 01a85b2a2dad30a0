"""The machine line: NVML with a stand-in driver, what it does not tell, and how it is drawn."""

from __future__ import annotations

import sys
import threading
from dataclasses import replace as changed
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from fluxtui.panels import PANELS
from fluxtui.panels.machine import machine_line
from fluxtui.screens.panel_screen import framed
from fluxtui.sources.machine import GpuReader, MachineSampler, watch
from fluxtui.state.machine_sample import GpuSample, MachineSample
from fluxtui.state.status import Link
from fluxtui.state.view import View
from fluxtui.widgets.spans import width_of

GIB = 1 << 30


class NVMLError(Exception):
    """What NVML raises for a question that it does not answer."""


class Driver(ModuleType):
    """Stands in for pynvml: answers what it was given, refuses the rest."""

    NVMLError = NVMLError

    def __init__(self, *cards: dict[str, Any], broken: bool = False, lost: int = -1) -> None:
        super().__init__("pynvml")
        self._cards, self._broken, self._lost = cards, broken, lost
        names = {name for card in cards for name in card}
        for name in (*names, "nvmlDeviceGetName", "nvmlDeviceGetPowerUsage"):
            setattr(self, name, self._answering(name))
        self.nvmlInit = self._begin
        self.nvmlDeviceGetCount = lambda: len(cards)
        self.nvmlDeviceGetHandleByIndex = self._handle

    def _handle(self, index: int) -> int:
        if index == self._lost:
            raise NVMLError("GPU is lost")
        return index

    def _answering(self, name: str) -> Any:
        def answer(handle: int, *arguments: int) -> Any:
            found = self._cards[handle].get(name)
            found = found.get(arguments[0]) if isinstance(found, dict) else found
            if found is None:
                raise NVMLError(name)
            return found

        return answer

    def _begin(self) -> None:
        if self._broken:
            raise NVMLError("no driver")


def told() -> dict[str, Any]:
    return {
        "nvmlDeviceGetName": "NVIDIA H200",
        "nvmlDeviceGetMemoryInfo": SimpleNamespace(used=24 * GIB, total=140 * GIB),
        "nvmlDeviceGetUtilizationRates": SimpleNamespace(gpu=91),
        "nvmlDeviceGetPowerUsage": 398_000,
        "nvmlDeviceGetEnforcedPowerLimit": 700_000,
        "nvmlDeviceGetTemperature": {0: 71},
        "nvmlDeviceGetClockInfo": {1: 1755, 2: 3201},
        "nvmlDeviceGetMaxClockInfo": {1: 1980},
        "nvmlDeviceGetCurrentClocksEventReasons": 0x4 | 0x1,
        "nvmlDeviceGetComputeRunningProcesses": [
            SimpleNamespace(pid=4242, usedGpuMemory=21 * GIB),
            SimpleNamespace(pid=77, usedGpuMemory=3 * GIB),
        ],
        "nvmlDeviceGetGraphicsRunningProcesses": [SimpleNamespace(pid=78, usedGpuMemory=None)],
    }


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Any:
    def install(*cards: dict[str, Any], broken: bool = False, lost: int = -1) -> None:
        monkeypatch.setitem(sys.modules, "pynvml", Driver(*cards, broken=broken, lost=lost))

    names = {4242: "python", 77: "Xorg"}
    monkeypatch.setattr("fluxtui.sources.machine.name_of", lambda pid: names.get(pid, ""))
    return install


def test_everything_that_the_card_tells_is_in_the_sample(driver: Any) -> None:
    driver(told())
    [sample] = GpuReader().read(4242)
    assert (sample.name, sample.utilisation) == ("NVIDIA H200", 0.91)
    assert (sample.memory_used_bytes, sample.memory_total_bytes) == (24 * GIB, 140 * GIB)
    assert (sample.power_w, sample.power_limit_w, sample.temperature_c) == (398.0, 700.0, 71.0)
    assert (sample.clock_mhz, sample.clock_limit_mhz) == (1755, 1980)
    assert sample.memory_clock_mhz == 3201
    assert sample.throttled_by == ("power limit",)
    assert [one.pid for one in sample.processes or ()] == [4242, 77, 78]
    assert [one.pid for one in sample.others] == [77, 78]
    assert [one.name for one in sample.others] == ["Xorg", ""]


@pytest.mark.parametrize("missing", sorted(told()))
def test_what_a_card_does_not_tell_is_unknown_and_the_rest_is_there(
    driver: Any, missing: str
) -> None:
    answers = told()
    del answers[missing]
    driver(answers)
    [sample] = GpuReader().read()
    driver(told())
    [complete] = GpuReader().read()
    assert sample != complete
    same = [
        field for field in GpuSample.__slots__ if getattr(sample, field) == getattr(complete, field)
    ]
    assert len(same) >= len(GpuSample.__slots__) - 2


def test_without_a_driver_or_a_card_there_is_no_sample(
    driver: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver(told(), broken=True)
    assert GpuReader().read() == ()
    driver()
    assert GpuReader().read() == ()
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert GpuReader().read() == ()


def test_the_sampler_of_the_app_takes_the_gpu_along(driver: Any) -> None:
    driver(told())
    sampler = MachineSampler()
    sample = sampler.sample(4242)
    [gpu] = sample.gpus
    assert gpu.utilisation == 0.91
    assert [one.is_trainer for one in gpu.processes or ()] == [True, False, False]


def test_the_machine_is_watched_until_it_is_told_to_stop(driver: Any) -> None:
    driver(told())
    stop, heard = threading.Event(), []

    def say(sample: MachineSample) -> None:
        heard.append(sample)
        stop.set()

    watch(say, stop, lambda: 4242)
    assert [gpu.has_trainer for gpu in heard[0].gpus] == [True]


# --- drawn ----------------------------------------------------------------------------------------


def drawn(sample: MachineSample | None, width: int = 60, height: int = 10) -> str:
    view = View(machine_sample=sample, monotonic_s=100.0)
    lines = framed(PANELS["machine"], view, width, height, "box")
    return "\n".join("".join(text for text, _ in spans) for spans in lines)


def sampled(*gpus: GpuSample) -> MachineSample:
    return MachineSample(100.0, 0.5, 16, 4 * GIB, 8 * GIB, GIB, 1.5, gpus)


@pytest.fixture
def card(driver: Any) -> GpuSample:
    driver(told())
    [sample] = GpuReader().read(4242)
    return sample


@pytest.fixture
def eight(card: GpuSample) -> list[GpuSample]:
    """The trainer is on the sixth of eight."""
    idle = changed(card, processes=(), utilisation=0.0, memory_used_bytes=GIB, throttled_by=())
    return [changed(card if i == 5 else idle, index=i) for i in range(8)]


@pytest.mark.parametrize(("width", "height"), [(47, 8), (60, 12), (76, 30), (116, 30)])
def test_all_gpus_are_there_at_every_size_and_the_trainers_is_marked(
    eight: list[GpuSample], width: int, height: int
) -> None:
    text = drawn(sampled(*eight), width, height)
    for gpu in eight:
        assert f"G{gpu.index} " in text
    assert text.count("▸G5") == 1 and "▸G4" not in text
    assert "CPU" in text and "RAM" in text


def line_of(sample: MachineSample | None, width: int = 80, **view: Any) -> str:
    whole = machine_line(View(machine_sample=sample, monotonic_s=100.0, **view), width)
    assert width_of(whole) <= width
    return "".join(text for text, _ in whole)


def test_one_line_never_shows_the_machine_of_now_as_that_of_a_recording(card: GpuSample) -> None:
    assert "91%" not in line_of(sampled(card), link=Link(replay=True))
    assert "last sample 10 s ago" in line_of(changed(sampled(card), monotonic_s=90.0))
    assert line_of(None) == "machine -"
