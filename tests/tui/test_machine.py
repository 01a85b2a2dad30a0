"""The machine line: NVML with a stand-in driver, what it does not tell, and how it is drawn."""

from __future__ import annotations

import sys
from dataclasses import replace as changed
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from fluxtui.panels import PANELS
from fluxtui.sources.gpu import GpuReader, processes_of, throttling
from fluxtui.sources.machine import MachineSampler
from fluxtui.state.machine import GpuProcess, GpuSample, MachineSample
from fluxtui.state.view import View
from fluxtui.widgets.framed import framed

GIB = 1 << 30


class NVMLError(Exception):
    """What NVML raises for a question that it does not answer."""


class Driver(ModuleType):
    """Stands in for pynvml: answers what it was given, refuses the rest."""

    NVMLError = NVMLError

    def __init__(self, answers: dict[str, Any], broken: bool = False) -> None:
        super().__init__("pynvml")
        self._answers, self._broken = answers, broken
        for name in (*answers, "nvmlDeviceGetName", "nvmlDeviceGetPowerUsage"):
            setattr(self, name, self._answering(name))
        self.nvmlInit = self._begin
        self.nvmlDeviceGetHandleByIndex = "gpu {}".format

    def _answering(self, name: str) -> Any:
        def answer(handle: object, *arguments: int) -> Any:
            found = self._answers.get(name)
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
    def install(answers: dict[str, Any], broken: bool = False) -> None:
        monkeypatch.setitem(sys.modules, "pynvml", Driver(answers, broken))

    names = {4242: "python", 77: "Xorg"}
    monkeypatch.setattr("fluxtui.sources.gpu.name_of", lambda pid: names.get(pid, ""))
    return install


def test_everything_that_the_card_tells_is_in_the_sample(driver: Any) -> None:
    driver(told())
    sample = GpuReader().read(4242)
    assert sample is not None
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
    sample = GpuReader().read()
    assert sample is not None
    whole = told()
    driver(whole)
    complete = GpuReader().read()
    assert complete is not None and sample != complete
    same = [
        field for field in GpuSample.__slots__ if getattr(sample, field) == getattr(complete, field)
    ]
    assert len(same) >= len(GpuSample.__slots__) - 2


def test_without_a_driver_or_a_card_there_is_no_sample(
    driver: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver(told(), broken=True)
    assert GpuReader().read() is None
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert GpuReader().read() is None


def test_the_sampler_of_the_app_takes_the_gpu_along(driver: Any) -> None:
    driver(told())
    sampler = MachineSampler()
    sample = sampler.sample(4242)
    assert sample.gpu is not None and sample.gpu.utilisation == 0.91
    assert [one.is_trainer for one in sample.gpu.processes or ()] == [True, False, False]


@pytest.mark.parametrize(
    ("bits", "words"),
    [(0x0, ()), (0x1, ()), (0x2 | 0x10, ()), (0x20, ("heat",)),
     (0x4 | 0x8, ("power limit", "hardware slowdown"))],
)  # fmt: skip
def test_idle_and_chosen_clocks_are_no_throttling(bits: int, words: tuple[str, ...]) -> None:
    assert throttling(bits) == words


def test_a_process_that_computes_and_draws_is_told_once() -> None:
    entries = [SimpleNamespace(pid=5, usedGpuMemory=GIB), SimpleNamespace(pid=5, usedGpuMemory=7)]
    [one] = processes_of(entries, None, lambda pid: "x")
    assert one == GpuProcess(pid=5, name="x", memory_bytes=GIB)


# --- drawn ----------------------------------------------------------------------------------------


def drawn(sample: MachineSample | None, width: int = 60, height: int = 10) -> str:
    view = View(machine_sample=sample, wall_s=100.0)
    lines = framed(PANELS["machine"], view, width, height, "box")
    return "\n".join("".join(text for text, _ in spans) for spans in lines)


def sampled(gpu: GpuSample | None = None) -> MachineSample:
    return MachineSample(100.0, 0.5, 16, 4 * GIB, 8 * GIB, GIB, 1.5, gpu)


@pytest.fixture
def card(driver: Any) -> GpuSample:
    driver(told())
    sample = GpuReader().read(4242)
    assert sample is not None
    return sample


def test_without_a_gpu_processor_memory_and_trainer_are_shown() -> None:
    text = drawn(sampled())
    assert "GPU" not in text
    for part in ("CPU", "50%", "16 cores", "of 8.00 GiB", "trainer 1.00 GiB", "1.5 cores"):
        assert part in text, part


def test_a_gpu_is_shown_first_with_its_limits_and_what_holds_it_back(card: GpuSample) -> None:
    text = drawn(sampled(card), 76, 12)
    assert text.index("GPU") < text.index("CPU")
    for part in ("91%", "398/700 W", "71 °C", "1755/1980 MHz", "held back by power limit"):
        assert part in text, part
    assert "2 others on the GPU" in text


def test_every_process_on_the_gpu_is_named_or_said_to_be_out_of_sight(card: GpuSample) -> None:
    rows = [row for row in drawn(sampled(card), 76, 12).splitlines() if "on GPU " in row]
    assert "trainer" in rows[0] and "21.0 GiB" in rows[0]
    assert "Xorg" in rows[1] and "process 77" in rows[1] and "3.00 GiB" in rows[1]
    assert "name not visible" in rows[2] and "- │" in rows[2]


def test_what_was_not_measured_is_a_dash() -> None:
    text = drawn(sampled(GpuSample(name="card")), 76, 8)
    assert "- W" in text and "- °C" in text and "- MHz" in text and "throttling -" in text
    assert "full speed" in drawn(sampled(GpuSample(name="card", throttled_by=())), 76, 8)


def test_an_old_sample_is_not_shown_as_the_present(card: GpuSample) -> None:
    old = changed(sampled(card), wall_s=90.0)
    assert "91%" not in drawn(old) and "-" in drawn(old)
    assert "last sample 10 s ago" in drawn(old)
    assert drawn(old).splitlines()[1:] == drawn(None).splitlines()[1:]
