"""Bytes that one card holds and that were copied to and from it."""

from __future__ import annotations

import torch

_HELD = ("allocated_bytes", "reserved_bytes")  # of torch's allocator


class CardCounts:
    """Counts of one card. Written by the computing thread, read by any."""

    def __init__(self, torch_device: torch.device) -> None:
        self._torch_device = torch_device
        self.block_input_bytes = 0  # held from forward to backward
        self.h2d_bytes = 0
        self.d2h_bytes = 0
        self.landed_bytes = 0  # came from other cards
        self.peak_bytes = 0  # the most that was held
        self._earlier_peaks = 0, 0  # in use and reserved, before torch's peaks were reset

    def device_peaks(self) -> tuple[int, int]:
        """Return the peaks of bytes that tensors used on the GPU and that torch reserved, ever."""
        now_used, now_reserved = held_by_torch(self._torch_device)
        used, reserved = self._earlier_peaks
        return max(used, now_used["peak"]), max(reserved, now_reserved["peak"])

    def measure_peaks_anew(self) -> None:
        """Reset torch's own peaks; `device_peaks` still covers the whole run."""
        if self._torch_device.type == "cuda":
            self._earlier_peaks = self.device_peaks()
            torch.cuda.reset_peak_memory_stats(self._torch_device)


def held_by_torch(device: torch.device) -> tuple[dict[str, int], dict[str, int]]:
    """Read the bytes (`current`, `peak`) that tensors use on the GPU, and that are reserved.

    `torch.cuda.memory_allocated` and its like each sort all numbers of the allocator for one of
    them, which would take the interpreter from the computation ten times a second.
    """
    numbers = torch.cuda.memory_stats_as_nested_dict(device)
    nothing = {"current": 0, "peak": 0}  # before the first use of the GPU
    used, reserved = (numbers.get(name, {}).get("all", nothing) for name in _HELD)
    return used, reserved
