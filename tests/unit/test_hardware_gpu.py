"""GPUs as the driver describes them, and the device that is chosen from that."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fluxtrain.errors import EXIT_BAD_INPUT, BadInput
from fluxtrain.events.answers.machine import Gpu, GpuProcess
from fluxtrain.machine.gpu import Gpus, check_accelerator, own_process_bytes, read_gpus
from fluxtrain.units import GIB


class DriverError(Exception):
    """What NVML raises."""


ANSWERS: dict[str, Callable[..., Any]] = {  # of NVML about two cards, by their handles
    "SystemGetDriverVersion": lambda: b"580.65.06",
    "DeviceGetHandleByIndex": lambda index: index,
    "DeviceGetName": lambda at: ("NVIDIA GeForce RTX 4090", "NVIDIA GeForce RTX 3060")[at],
    "DeviceGetUUID": lambda at: f"MIG-cccc-{at}" if at >= 100 else ("GPU-aaaa-1", "GPU-bbbb-2")[at],
    "DeviceGetMemoryInfo": lambda at: SimpleNamespace(
        total=(24, 12)[at] * GIB, free=(20, 11)[at] * GIB
    ),
    "DeviceGetCudaComputeCapability": lambda at: (8, (9, 6)[at]),
    "DeviceGetMaxPcieLinkGeneration": lambda at: 4,
    "DeviceGetCurrPcieLinkWidth": lambda at: (16, 8)[at],
    "DeviceGetGpuMaxPcieLinkGeneration": lambda at: (4, 5)[at],
    "DeviceGetMaxPcieLinkWidth": lambda at: 16,
    "DeviceGetPowerManagementLimit": lambda at: (300_000, 170_000)[at],
    "DeviceGetPowerManagementDefaultLimit": lambda at: (450_000, 170_000)[at],
    "DeviceGetPciInfo": lambda at: SimpleNamespace(busId=f"00000000:0{at + 1}:00.0"),
    "DeviceGetMaxMigDeviceCount": lambda at: 7,
}


@dataclass
class Driver:
    """NVML with cards of our making; `refuses` names the functions that fail."""

    split: tuple[int, ...] = ()  # cards whose MIG mode is on
    refuses: tuple[str, ...] = ()
    computing: tuple[dict[int, int | None], ...] = ({os.getpid(): GIB, 7: 2 * GIB}, {})
    drawing: tuple[dict[int, int | None], ...] = ({3: None}, {})
    NVMLError = DriverError
    open_count: int = 0

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return partial(self._answer, name)

    def _answer(self, name: str, *given: int) -> Any:
        what = name.removeprefix("nvml")
        mig_slice = what == "DeviceGetMigDeviceHandleByIndex" and given[1] in (0, 2)
        if name in self.refuses:
            raise DriverError("Not Supported")
        if what in ("Init", "Shutdown"):
            self.open_count += 1 if what == "Init" else -1
            return None
        if what == "DeviceGetCount":
            return len(self.computing)
        if what in ("DeviceGetComputeRunningProcesses", "DeviceGetGraphicsRunningProcesses"):
            held = self.computing if "Compute" in what else self.drawing
            return [SimpleNamespace(pid=p, usedGpuMemory=n) for p, n in held[given[0]].items()]
        if what == "DeviceGetMigMode" and given[0] in self.split:
            return (1, 1)
        if mig_slice:
            return 100 + given[1]
        if what not in ANSWERS:
            raise DriverError("Not Supported")
        return ANSWERS[what](*given)


@pytest.fixture
def driver() -> Driver:
    return Driver()


def devices(folder: Path, *nodes: int) -> Path:
    """The kernel's folder of PCI devices with a NUMA node for each card."""
    for position, node in enumerate(nodes, start=1):
        (folder / f"0000:0{position}:00.0").mkdir(parents=True)
        (folder / f"0000:0{position}:00.0" / "numa_node").write_text(f"{node}\n")
    return folder


def test_every_card_is_described(driver: Driver, tmp_path: Path) -> None:
    found = read_gpus(driver, devices=devices(tmp_path, 1, 0))
    assert found.driver == "580.65.06"
    assert found.reason is None
    large, small = found.gpus
    assert large == Gpu(
        index=0,
        name="NVIDIA GeForce RTX 4090",
        uuid="GPU-aaaa-1",
        memory_total_bytes=24 * GIB,
        memory_free_bytes=20 * GIB,
        other_processes=(GpuProcess(pid=3, used_bytes=None), GpuProcess(pid=7, used_bytes=2 * GIB)),
        compute_capability="8.9",
        pcie_generation=4,
        pcie_width=16,
        bf16=True,
        pcie_card_generation=4,
        pcie_card_width=16,
        power_limit_w=300.0,
        power_default_w=450.0,
        numa_node=1,
        mig=False,
        mig_slices=(),
        unknown={},
    )
    assert (small.index, small.pcie_width, small.other_processes) == (1, 8, ())
    assert driver.open_count == 0


def test_a_fact_that_the_driver_refuses_is_none_with_its_words(driver: Driver) -> None:
    refused = {
        "nvmlDeviceGetMemoryInfo": ("memory_total_bytes", "memory_free_bytes"),
        "nvmlDeviceGetCurrPcieLinkWidth": ("pcie_width",),
        "nvmlDeviceGetCudaComputeCapability": ("compute_capability", "bf16"),
        "nvmlDeviceGetPowerManagementLimit": ("power_limit_w",),
        "nvmlDeviceGetPciInfo": ("numa_node",),
    }
    driver.refuses = tuple(refused)
    gpu = read_gpus(driver).gpus[0]
    assert gpu.name == "NVIDIA GeForce RTX 4090"
    names = {name for several in refused.values() for name in several}
    for name in names:
        assert getattr(gpu, name) is None
        assert gpu.unknown[name] == "Not Supported"
    assert set(gpu.unknown) == names


def test_a_broken_library_does_not_hide_the_cards_that_the_kernel_drives(
    driver: Driver, tmp_path: Path
) -> None:
    driver.refuses = ("nvmlDeviceGetCount",)
    (tmp_path / "0000:01:00.0").mkdir()
    (gpu,) = read_gpus(driver, tmp_path).gpus
    nameless = {name for name in gpu.__struct_fields__ if getattr(gpu, name) is None}
    assert nameless == set(gpu.unknown) == set(gpu.__struct_fields__) - {"index", "unknown"}
    assert gpu.unknown["memory_total_bytes"] == "NVML says: Not Supported"
    assert driver.open_count == 0


@pytest.mark.parametrize(
    ("value", "indices"),
    [
        (None, [0, 1]),
        ("0,1", [0, 1]),
        ("1", [1]),
        (" 1 , 0 ", [1, 0]),
        ("GPU-bbbb", [1]),
        ("0,7,1", [0]),
        ("", []),
        ("-1", []),
        ("NoDevFiles", []),
    ],
)
def test_cuda_visible_devices_is_read_as_cuda_reads_it(
    driver: Driver, value: str | None, indices: list[int]
) -> None:
    environment = {} if value is None else {"CUDA_VISIBLE_DEVICES": value}
    assert [gpu.index for gpu in read_gpus(driver).visible(environment)] == indices


@pytest.mark.parametrize(
    ("value", "indices"),
    [
        ("MIG-cccc-102", [1]),
        ("MIG-cccc-1", [1]),
        ("0,MIG-cccc-100", [0, 1]),
        ("MIG-GPU-bbbb-2/3/0", [1]),
        ("MIG-dddd", []),
    ],
)
def test_a_slice_of_mig_is_its_card(driver: Driver, value: str, indices: list[int]) -> None:
    driver.split = (1,)
    found = read_gpus(driver)
    whole, split = found.gpus
    assert (whole.mig, whole.mig_slices) == (False, ())
    assert (split.mig, split.mig_slices) == (True, ("MIG-cccc-100", "MIG-cccc-102"))
    visible = found.visible({"CUDA_VISIBLE_DEVICES": value})
    assert [gpu.index for gpu in visible] == indices


@pytest.fixture
def two_cards(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> Gpus:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return read_gpus(driver)


NONE = Gpus(gpus=(), driver=None, reason="NVML says: Library Not Found")


def test_a_gpu_that_torch_cannot_use_stops_the_run_with_the_cure(two_cards: Gpus) -> None:
    with pytest.raises(BadInput, match=r"RTX 4090 .24\.0 GiB.* install the CUDA build") as refused:
        check_accelerator(False, gpus=two_cards)
    assert refused.value.exit_code == EXIT_BAD_INPUT
    assert "placement.device=cpu" in str(refused.value)
    with pytest.raises(BadInput, match=r"CUDA 13\.0, the driver is 580\.65\.06: update the driver"):
        check_accelerator(False, "cuda", torch_cuda_version="13.0", gpus=two_cards)


def test_without_a_gpu_the_cpu_is_chosen_with_the_reason_and_cuda_is_refused() -> None:
    choice = check_accelerator(False, gpus=NONE)
    assert (choice.value, choice.because) == (
        "cpu",
        "no NVIDIA GPU: NVML says: Library Not Found",
    )
    with pytest.raises(BadInput, match=r"device=cuda, but no NVIDIA GPU"):
        check_accelerator(False, "cuda", gpus=NONE)


# --- what this process holds ----------------------------------------------------------------------

ME = 4_000_001  # above what the kernel gives out, so that nobody here has it
HOST = 4_000_002  # what the host calls this process
STRANGER = 4_000_003


@pytest.mark.parametrize(
    ("computing", "drawing", "held"),
    [
        (({ME: 2 * GIB, STRANGER: 5 * GIB}, {ME: GIB}), ({ME: 2 * GIB}, {}), 3 * GIB),
        (({HOST: GIB}, {HOST: GIB}), ({}, {}), 2 * GIB),  # alone, under a number of nobody here
        (({HOST: GIB, STRANGER: GIB},), ({},), None),
        (({os.getppid(): GIB},), ({},), None),
        (({ME: None},), ({},), None),
    ],
)
def test_the_memory_of_this_process_counts_on_every_card_and_no_others_does(
    computing: tuple[dict[int, int | None], ...], drawing: tuple[dict[int, int | None], ...],
    held: int | None, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    driver = Driver(computing=computing, drawing=drawing)
    assert own_process_bytes(driver, ME) == held
    assert driver.open_count == 0


@pytest.mark.parametrize("refused", ["nvmlInit", "nvmlDeviceGetComputeRunningProcesses"])
def test_a_driver_that_does_not_answer_is_unknown_memory(refused: str) -> None:
    driver = Driver(refuses=(refused,))
    assert own_process_bytes(driver, os.getpid()) is None
    assert driver.open_count == 0
