"""How much GPU memory is this process's own, as drivers in and out of containers tell it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from fluxtrain.machine.gpu import own_process_bytes
from fluxtrain.units import GIB

ME = 4_000_001  # above what the kernel gives out, so that nobody here has it
HOST = 4_000_002  # what the host calls this process
STRANGER = 4_000_003


class DriverError(Exception):
    """What NVML raises."""


class Driver:
    """NVML that lists `(pid, bytes)` for each card and refuses every other question."""

    NVMLError = DriverError

    def __init__(self, *cards: list[tuple[int, int | None]], draws: bool = False) -> None:
        self.cards, self.draws, self.open_count = cards, draws, 0

    def __getattr__(self, name: str) -> Any:
        def refuse(*_: object) -> None:
            raise DriverError("Not Supported")

        return refuse

    def nvmlInit(self) -> None:  # noqa: N802 - named as the library names it
        self.open_count += 1

    def nvmlShutdown(self) -> None:  # noqa: N802
        self.open_count -= 1

    def nvmlSystemGetDriverVersion(self) -> str:  # noqa: N802
        return "580"

    def nvmlDeviceGetCount(self) -> int:  # noqa: N802
        return len(self.cards)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:  # noqa: N802
        return index

    def nvmlDeviceGetComputeRunningProcesses(self, handle: int) -> list[Any]:  # noqa: N802
        return [SimpleNamespace(pid=p, usedGpuMemory=size) for p, size in self.cards[handle]]

    def nvmlDeviceGetGraphicsRunningProcesses(self, handle: int) -> list[Any]:  # noqa: N802
        return self.nvmlDeviceGetComputeRunningProcesses(handle) if self.draws else []


@pytest.fixture(autouse=True)
def _all_cards_visible(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def test_the_own_process_counts_on_every_card_and_no_other_does() -> None:
    driver = Driver([(ME, 2 * GIB), (STRANGER, 5 * GIB)], [(ME, GIB)])
    assert own_process_bytes(driver, ME) == 3 * GIB
    assert driver.open_count == 0


def test_alone_under_a_number_that_means_nobody_here_is_this_process() -> None:
    assert own_process_bytes(Driver([(HOST, GIB)], [(HOST, GIB)]), ME) == 2 * GIB


def test_of_several_unknown_processes_none_can_be_told_to_be_this_one() -> None:
    assert own_process_bytes(Driver([(HOST, GIB), (STRANGER, GIB)]), ME) is None


def test_a_driver_that_does_not_answer_is_unknown_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise DriverError("Driver Not Loaded")

    driver = Driver([(ME, GIB)])
    monkeypatch.setattr(driver, "nvmlInit", refuse)
    assert own_process_bytes(driver, ME) is None
    quiet = Driver([(ME, GIB)])
    monkeypatch.setattr(quiet, "nvmlDeviceGetComputeRunningProcesses", refuse)
    assert own_process_bytes(quiet, ME) is None
    assert quiet.open_count == 0
