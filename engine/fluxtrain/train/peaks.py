"""The most memory that this process ever held, as the plan's peaks mean it."""

from __future__ import annotations

import re
import resource
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fluxtrain.stream.engine import Engine


def measured_peaks(engine: Engine) -> dict[str, float | None]:
    """Bytes: the host's by the kernel, the device's by torch's allocator.

    `device_peak_bytes` is what the plan predicts: memory in use by tensors. What the allocator has
    reserved beside that (free pieces between them) and CUDA's own share are told as well. All three
    are None without a GPU, whose memory is then the host's.
    """
    on_gpu = engine.device.torch_device.type == "cuda"
    used, reserved = engine.accounts.device_peaks() if on_gpu else (None, None)
    return {
        "device_peak_bytes": used,
        "device_reserved_peak_bytes": reserved,
        "host_peak_bytes": host_peak_bytes(),
    }


def host_peak_bytes(status: Path = Path("/proc/self/status")) -> int:
    """The peak of this process's resident memory since it began."""
    try:
        found = re.search(r"^VmHWM:\s+(\d+) kB", status.read_text(), re.MULTILINE)
    except OSError:
        found = None
    if found is not None:
        return int(found[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
