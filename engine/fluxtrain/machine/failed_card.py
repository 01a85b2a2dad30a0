"""Says whether an error of CUDA is a card that failed, and which one: the driver is asked."""

from __future__ import annotations

from importlib import import_module
from typing import Any

# What CUDA says of cards and drivers, and never of a program's own faults
# (cudaGetErrorString, CUDA runtime API, error handling).
_OF_HARDWARE = (
    "uncorrectable ecc error", "uncorrectable nvlink error", "hardware stack error",
    "hardware error", "busy or unavailable", "no cuda-capable device", "driver shutting down",
    "system not yet initialized", "unknown error", "launch timed out", "was terminated",
)  # fmt: skip
# Answers of NVML that mean the card is gone: GPU_IS_LOST, RESET_REQUIRED, GPU_NOT_FOUND, UNKNOWN
_GONE = (15, 16, 28, 999)


def device_failure(error: BaseException, nvml: Any = None) -> str | None:
    """Return in words that a card failed, which one and the cure; None where `error` is no error of
    CUDA, or one of a program. Tests pass another module as `nvml`."""
    words = str(error)
    first = words.splitlines()[0] if words else ""
    is_cuda = type(error).__name__ == "AcceleratorError" or first.startswith("CUDA error:")
    if not isinstance(error, RuntimeError) or not is_cuda:
        return None
    gone = _cards_gone(nvml)
    of_hardware = any(text in first.lower() for text in _OF_HARDWARE)
    if not gone and not of_hardware:
        return None
    which = " and ".join(gone) + " answered no more" if gone else "a GPU or its driver failed"
    return (
        f"{which} ({first}): the kernel's log says why (`dmesg | grep -i xid`); reset the card or "
        "restart the machine, or leave the card out with CUDA_VISIBLE_DEVICES"
    )


def _cards_gone(nvml: Any) -> list[str]:
    """Name the cards that the driver knows and that do not answer."""
    try:
        nvml = import_module("pynvml") if nvml is None else nvml
        nvml.nvmlInit()
    except Exception:  # noqa: BLE001 - a broken driver may raise anything: then none is named
        return []
    try:
        count = nvml.nvmlDeviceGetCount()
        return [f"GPU {index}" for index in range(count) if not _answers(nvml, index)]
    except nvml.NVMLError:
        return []
    finally:
        nvml.nvmlShutdown()


def _answers(nvml: Any, index: int) -> bool:
    try:
        nvml.nvmlDeviceGetMemoryInfo(nvml.nvmlDeviceGetHandleByIndex(index))
    except nvml.NVMLError as error:
        return getattr(error, "value", None) not in _GONE
    return True
