"""Measure the most memory that this process ever held, as the plan counts its peaks."""

from __future__ import annotations

import re
import resource
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fluxtrain.core.wrap.engine import Engine

PROCESS = Path("/proc/self")
RESET_PEAK = "5"  # to clear_refs, proc(5)
_earlier_peaks = [0]


def measured_peaks(engine: Engine) -> dict[str, float | None]:
    """Return the peaks in bytes: the host's from the kernel, the device's from torch's allocator.

    `device_peak_bytes` is what the plan predicts: memory in use by tensors.
    `device_reserved_peak_bytes` is what the allocator had reserved, which includes free ranges
    between tensors. Both are None without a GPU, as all memory is then the host's.
    """
    on_gpu = engine.device.torch_device.type == "cuda"
    used: int | None = None
    reserved: int | None = None
    if on_gpu:  # of all cards together, as the plan's
        peaks = [card.counts.device_peaks() for card in engine.cards]
        used, reserved = sum(peak[0] for peak in peaks), sum(peak[1] for peak in peaks)
    return {
        "device_peak_bytes": used,
        "device_reserved_peak_bytes": reserved,
        "host_peak_bytes": host_peak_bytes(),
    }


def host_peak_bytes(process: Path = PROCESS) -> int:
    """Return the peak of this process's resident memory since its start."""
    found = _resident(process, "VmHWM")
    if found is None:
        found = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return max(found, _earlier_peaks[0])


def recent_host_peak_bytes(process: Path = PROCESS) -> int | None:
    """Return the peak since `measure_host_peak_anew`; None where the kernel does not tell."""
    return _resident(process, "VmHWM")


def measure_host_peak_anew(process: Path = PROCESS) -> int | None:
    """Begin a new peak and return the bytes resident now; `host_peak_bytes` stays that of the whole
    process. None where the kernel does not allow it (Linux, proc(5)); no peak begins then."""
    before = host_peak_bytes(process)
    try:
        (process / "clear_refs").write_text(RESET_PEAK)
    except OSError:
        return None
    _earlier_peaks[0] = before
    return _resident(process, "VmRSS")


def _resident(process: Path, name: str) -> int | None:
    try:
        found = re.search(rf"^{name}:\s+(\d+) kB", (process / "status").read_text(), re.MULTILINE)
    except OSError:
        return None
    return None if found is None else int(found[1]) * 1024
