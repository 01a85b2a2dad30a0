"""A card that fails is named, and is no bug of ours."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from fluxtrain.errors import DeviceFailed
from fluxtrain.machine.failures import as_told, device_failure


class NvmlError(Exception):
    def __init__(self, value: int) -> None:
        super().__init__(f"error {value}")
        self.value = value


def driver(*answers: int | None) -> Any:
    """NVML with so many cards; each answers, or with an error."""

    def memory(handle: int) -> int:
        if (error := answers[handle]) is not None:
            raise NvmlError(error)
        return 1

    return SimpleNamespace(
        NVMLError=NvmlError, nvmlInit=lambda: None, nvmlShutdown=lambda: None,
        nvmlDeviceGetCount=lambda: len(answers), nvmlDeviceGetHandleByIndex=lambda index: index,
        nvmlDeviceGetMemoryInfo=memory,
    )  # fmt: skip


FAULT = RuntimeError("CUDA error: unspecified launch failure\nCUDA kernel errors might be ...")


@pytest.mark.parametrize("code", [15, 16, 28, 999])
def test_the_card_that_does_not_answer_is_named(code: int) -> None:
    told = device_failure(FAULT, driver(None, code))
    assert told is not None
    assert told.startswith("GPU 1 answered no more (CUDA error: unspecified launch failure)")
    both = device_failure(FAULT, driver(code, code))
    assert both is not None and both.startswith("GPU 0 and GPU 1")


@pytest.mark.parametrize(
    "text",
    ["uncorrectable ECC error encountered", "CUDA-capable device(s) is/are busy or unavailable",
     "unknown error"],
)  # fmt: skip
def test_faults_of_cards_are_told_where_the_driver_is_silent(text: str) -> None:
    def broken() -> None:
        raise OSError("the driver is gone")

    nvml = driver(None)
    nvml.nvmlInit = broken
    told = device_failure(RuntimeError(f"CUDA error: {text}"), nvml)
    assert told is not None and told.startswith(f"a GPU or its driver failed (CUDA error: {text})")
    found = as_told(RuntimeError(f"CUDA error: {text}"))
    assert isinstance(found, DeviceFailed) and found.exit_code == 7


@pytest.mark.parametrize(
    "error",
    [FAULT, RuntimeError("CUDA error: device-side assert triggered"), RuntimeError("shapes"),
     RuntimeError("CUDA out of memory. GPU 1"), ValueError("CUDA error: unknown error"),
     NvmlError(3)],
)  # fmt: skip
def test_other_errors_are_what_they_were(error: Exception) -> None:
    assert device_failure(error, driver(None, 3)) is None, "NOT_SUPPORTED is an answer"


class PanicException(BaseException):
    """What libraries in Rust raise."""


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (OSError(12, "Cannot allocate memory", "x"), 3),
        (ImportError("libx.so: failed to map segment from shared object"), 3),
        (RuntimeError("can't start new thread"), 3),
        (PanicException("ThreadPoolBuildError { kind: WouldBlock }"), 3),
        (PanicException("index out of bounds: the len is 0"), 2),
    ],
)
def test_what_libraries_raise_at_limits_has_its_code_and_cure(
    error: BaseException, code: int
) -> None:
    told = as_told(error)
    assert told is not None and told.exit_code == code
