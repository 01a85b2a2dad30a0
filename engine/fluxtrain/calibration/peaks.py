"""The most memory that this process ever held, as the plan's peaks mean it."""

from __future__ import annotations

import re
import resource
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fluxtrain.wrapping.engine import Engine

PROCESS = Path("/proc/self")
RESET_PEAK = "5"  # to clear_refs, proc(5)
_earlier_peaks = [0]


def measured_peaks(engine: Engine) -> dict[str, float | None]:
    """Bytes: the host's by the kernel, the device's by torch's allocator.

    `device_peak_bytes` is what the plan predicts: memory in use by tensors. What the allocator has
    reserved beside that (free pieces between them) and CUDA's own share are told as well. All three
    are None without a GPU, whose memory is then the host's.
    """
    on_gpu = engine.device.torch_device.type == "cuda"
    used, reserved = engine.counters.device_peaks() if on_gpu else (None, None)
    return {
        "device_peak_bytes": used,
        "device_reserved_peak_bytes": reserved,
        "host_peak_bytes": host_peak_bytes(),
    }


def host_peak_bytes(process: Path = PROCESS) -> int:
    """The peak of this process's resident memory since it began."""
    found = _resident(process, "VmHWM")
    if found is None:
        found = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return max(found, _earlier_peaks[0])


def recent_host_peak_bytes(process: Path = PROCESS) -> int | None:
    """The peak since `measure_host_peak_anew`; None where the kernel does not tell."""
    return _resident(process, "VmHWM")


def measure_host_peak_anew(process: Path = PROCESS) -> int | None:
    """Begin another peak, and give what is resident now; `host_peak_bytes` stays that of the whole
    process. None, and nothing begins, where the kernel does not let it (Linux, proc(5))."""
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
