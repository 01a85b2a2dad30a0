"""Translates an exception for the user: a documented exit, or a bug of FluxTrain."""

from __future__ import annotations

import errno
import os
from importlib import import_module
from pathlib import Path
from typing import Any

from fluxtrain.errors import (
    BadInput,
    DeviceFailed,
    DoesNotFit,
    FluxTrainError,
    NoSpace,
    brief,
    is_panic,
    system_error,
)
from fluxtrain.files.temporary import FULL, free_text, moved_by

_UNUSABLE = frozenset(
    {
        errno.EACCES, errno.EEXIST, errno.EIO, errno.EISDIR, errno.ELOOP, errno.ENAMETOOLONG,
        errno.ENOTDIR, errno.EOVERFLOW, errno.EPERM, errno.EROFS, errno.ESTALE,
    }
)  # fmt: skip
_NO_MEMORY = (
    "can't allocate memory", "cannot allocate memory", "not enough memory", "out of memory",
    "failed to map segment",
)  # fmt: skip
_NO_THREAD = ("can't start new thread", "thread creation failed", "threadpoolbuild")


def as_told(error: BaseException) -> FluxTrainError | None:
    """Return `error` as one of ours; None if it is a bug.

    Memory and disks run out inside libraries, which raise their own errors; torch's out-of-memory
    error is a RuntimeError, so torch need not be imported to recognise it.
    """
    if isinstance(error, FluxTrainError):
        return error
    inner = error if isinstance(error, OSError) else system_error(error)
    if inner is not None and (refused := _by_system(inner)) is not None:
        return refused
    if (failed := device_failure(error)) is not None:
        return DeviceFailed(failed)
    return _by_words(error)


def _by_words(error: BaseException) -> FluxTrainError | None:
    """Return the limit of the system that a library names: they raise errors of no kind of their
    own for it."""
    words = str(error).lower()
    told = isinstance(error, RuntimeError | ImportError | OSError)
    if isinstance(error, RuntimeError) and words.startswith("could not determine home"):
        return BadInput("a path starts with ~ and a name that is no user here: write it in full")
    if told and "too many open files" in words:
        return DoesNotFit(
            "the system lets this process open no more files: raise its limit (`ulimit -n`), or "
            "close other programs where the limit is the machine's"
        )
    if (told or is_panic(error)) and any(text in words for text in _NO_THREAD):
        return DoesNotFit(
            "the system refuses another thread: raise its limit of processes and threads (`ulimit "
            "-u`, a container's pids limit), or of memory (`ulimit -v`), or close other programs"
        )
    if is_panic(error):
        return BadInput(
            f"a library of the tokenizer or of the weights' files failed ({first_line(error)}): "
            "copy or download the model's folder again"
        )
    if isinstance(error, MemoryError) or (told and any(text in words for text in _NO_MEMORY)):
        return DoesNotFit(
            f"memory ran out ({first_line(error)}): lower train.batch_rows or "
            "data.sequence_length, choose a smaller model, or close other programs"
        )
    return None


def _by_system(error: OSError) -> FluxTrainError | None:
    if error.errno == errno.ENOENT and "no usable temporary directory" in str(error).lower():
        return BadInput(f"{error.strerror}: set TMPDIR to a folder that can be written")
    path = Path(os.fsdecode(error.filename)) if error.filename else _cache_of_triton(error)
    cure = None if path is None else moved_by(path)
    if error.errno in FULL:
        file = "unnamed file" if path is None else brief(str(path))
        free = "" if path is None else f"; {free_text(path)} free"
        return NoSpace(
            f"no space left ({error.strerror}: {file}{free}): free some, or "
            f"{cure or 'choose another disk with --run-dir'}"
        )
    if error.errno in _UNUSABLE and path is not None:
        told = f"{brief(str(path))} cannot be used: {error.strerror}"
        return BadInput(told if cure is None else f"{told}: {cure}")
    return None


def _cache_of_triton(error: OSError) -> Path | None:
    """Return Triton's cache where Triton wrote: a full disk refuses a write without its file."""
    trace = error.__traceback__
    while trace is not None:
        if str(trace.tb_frame.f_globals.get("__name__")).startswith("triton."):
            named = os.environ.get("TRITON_CACHE_DIR")
            return Path(named or os.path.expanduser("~/.triton/cache"))
        trace = trace.tb_next
    return None


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, or its kind."""
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__


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
