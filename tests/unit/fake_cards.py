"""Made-up cards, as nvidia-smi and as torch see them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from msgspec.structs import replace

from fluxtrain.events.answers.machine import Gpu, Machine
from fluxtrain.machine.machine import read_machine
from fluxtrain.units import GIB


def gpu(index: int, **facts: Any) -> Gpu:
    base: dict[str, Any] = {
        "index": index,
        "name": "RTX 4090",
        "uuid": f"GPU-{index}{index}",
        "memory_total_bytes": 24 * GIB,
        "memory_free_bytes": 23 * GIB,
        "other_processes": (),
        "compute_capability": "8.9",
        "pcie_generation": 4,
        "pcie_width": 16,
        "numa_node": index % 2,
    }
    return Gpu(**(base | facts))


def machine(*gpus: Gpu) -> Machine:
    return replace(read_machine(), gpus=gpus)


class Cuda:
    """torch.cuda with cards of our making, by the UUIDs of the driver's."""

    def __init__(self, *uuids: str, capability: tuple[int, int] = (8, 9)) -> None:
        self.uuids, self.capability = uuids, capability

    def is_available(self) -> bool:
        return True

    def device_count(self) -> int:
        return len(self.uuids)

    def get_device_properties(self, index: int) -> Any:
        major, minor = self.capability
        uuid = self.uuids[index]
        name = "RTX 4090" if uuid else "Other"
        facts = SimpleNamespace(name=name, major=major, minor=minor, total_memory=24 * GIB)
        if uuid:
            facts.uuid = uuid
        return facts
