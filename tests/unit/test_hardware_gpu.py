"""GPUs as the driver describes them, and the device that is chosen from that."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fluxtrain.errors import EXIT_BAD_INPUT, BadInput
from fluxtrain.events.answers.machine import Gpu, GpuProcess
from fluxtrain.machine.gpu import Gpus, check_accelerator, read_gpus
from fluxtrain.units import GIB


class DriverError(Exception):
    """What NVML raises."""


@dataclass
class Driver:
    """NVML with cards of our making; `refuses` names the functions that fail."""

    cards: int = 2
    split: tuple[int, ...] = ()  # cards whose MIG mode is on
    refuses: tuple[str, ...] = ()
    NVMLError = DriverError
    open_count: int = 0

    def __getattr__(self, name: str) -> Any:
        if name in self.refuses:

            def refuse(*_: object) -> None:
                raise DriverError("Not Supported")

            return refuse
        try:
            return getattr(type(self), f"answer_{name}").__get__(self)
        except AttributeError:
            raise AttributeError(name) from None

    def answer_nvmlInit(self) -> None:  # noqa: N802 - named as the library names it
        self.open_count += 1

    def answer_nvmlShutdown(self) -> None:  # noqa: N802
        self.open_count -= 1

    def answer_nvmlSystemGetDriverVersion(self) -> bytes:  # noqa: N802
        return b"580.65.06"

    def answer_nvmlDeviceGetCount(self) -> int:  # noqa: N802
        return self.cards

    def answer_nvmlDeviceGetHandleByIndex(self, index: int) -> int:  # noqa: N802
        return index

    def answer_nvmlDeviceGetName(self, handle: int) -> str:  # noqa: N802
        return ("NVIDIA GeForce RTX 4090", "NVIDIA GeForce RTX 3060")[handle]

    def answer_nvmlDeviceGetUUID(self, handle: int) -> str:  # noqa: N802
        return f"MIG-cccc-{handle}" if handle >= 100 else ("GPU-aaaa-1", "GPU-bbbb-2")[handle]

    def answer_nvmlDeviceGetMemoryInfo(self, handle: int) -> SimpleNamespace:  # noqa: N802
        return SimpleNamespace(total=(24, 12)[handle] * GIB, free=(20, 11)[handle] * GIB)

    def answer_nvmlDeviceGetCudaComputeCapability(self, handle: int) -> tuple[int, int]:  # noqa: N802
        return (8, (9, 6)[handle])

    def answer_nvmlDeviceGetMaxPcieLinkGeneration(self, handle: int) -> int:  # noqa: N802
        return 4

    def answer_nvmlDeviceGetCurrPcieLinkWidth(self, handle: int) -> int:  # noqa: N802
        return (16, 8)[handle]

    def answer_nvmlDeviceGetGpuMaxPcieLinkGeneration(self, handle: int) -> int:  # noqa: N802
        return (4, 5)[handle]

    def answer_nvmlDeviceGetMaxPcieLinkWidth(self, handle: int) -> int:  # noqa: N802
        return 16

    def answer_nvmlDeviceGetPowerManagementLimit(self, handle: int) -> int:  # noqa: N802
        return (300_000, 170_000)[handle]

    def answer_nvmlDeviceGetPowerManagementDefaultLimit(self, handle: int) -> int:  # noqa: N802
        return (450_000, 170_000)[handle]

    def answer_nvmlDeviceGetPciInfo(self, handle: int) -> SimpleNamespace:  # noqa: N802
        return SimpleNamespace(busId=f"00000000:0{handle + 1}:00.0")

    def answer_nvmlDeviceGetMigMode(self, handle: int) -> tuple[int, int]:  # noqa: N802
        if handle not in self.split:
            raise DriverError("Not Supported")
        return (1, 1)

    def answer_nvmlDeviceGetMaxMigDeviceCount(self, handle: int) -> int:  # noqa: N802
        return 7

    def answer_nvmlDeviceGetMigDeviceHandleByIndex(self, handle: int, number: int) -> int:  # noqa: N802
        if number not in (0, 2):
            raise DriverError("Not Found")
        return 100 + number

    def answer_nvmlDeviceGetComputeRunningProcesses(self, handle: int) -> list[Any]:  # noqa: N802
        mine = SimpleNamespace(pid=os.getpid(), usedGpuMemory=GIB)
        return [mine, SimpleNamespace(pid=7, usedGpuMemory=2 * GIB)] if handle == 0 else []

    def answer_nvmlDeviceGetGraphicsRunningProcesses(self, handle: int) -> list[Any]:  # noqa: N802
        return [SimpleNamespace(pid=3, usedGpuMemory=None)] if handle == 0 else []


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
