"""What a benchmark's process takes: of the GPU as NVML reports it, and of the host."""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from typing import Any

import psutil
import pynvml
import torch

GIB = 1 << 30
EVERY_S = 0.05


class MemoryWatch(threading.Thread):
    """Peak GPU memory of this process by NVML, and peak host memory above an empty process.

    Empty is this process when the watch is made: with all that it imports, CUDA's context and one
    small kernel of torch, but no model. A process that trains anything on this GPU has that much.
    """

    def __init__(self) -> None:
        super().__init__(daemon=True)
        torch.ones(1, device="cuda").add_(1)
        torch.cuda.synchronize()
        self.device_bytes = [0] * torch.cuda.device_count()
        self.host_bytes = {"setup": 0, "training": 0}
        self._phase = "setup"
        self.empty_host_bytes = psutil.Process().memory_info().rss
        self._ended = threading.Event()
        pynvml.nvmlInit()
        numbers = range(len(self.device_bytes))
        self._handles = [pynvml.nvmlDeviceGetHandleByIndex(number) for number in numbers]

    def run(self) -> None:
        process = psutil.Process()
        while not self._ended.wait(EVERY_S):
            for card, handle in enumerate(self._handles):
                for entry in pynvml.nvmlDeviceGetComputeRunningProcesses(handle):
                    if entry.pid == os.getpid() or entry.usedGpuMemory is not None:
                        held_bytes = max(self.device_bytes[card], entry.usedGpuMemory or 0)
                        self.device_bytes[card] = held_bytes
            phase = self._phase
            self.host_bytes[phase] = max(self.host_bytes[phase], process.memory_info().rss)

    def ends_setup(self) -> None:
        """What is taken from here on is the training's: the engine stands."""
        self._phase = "training"

    def stop(self) -> None:
        self._ended.set()
        self.join()

    def figures(self, row: Mapping[str, Any]) -> dict[str, float]:
        """Both peaks, for the result of a row."""
        cards = [round(held_bytes / GIB, 4) for held_bytes in self.device_bytes]
        taken: dict[str, Any] = {"nvml_gib": cards[0], "nvml_cards_gib": cards}
        above = {name: peak - self.empty_host_bytes for name, peak in self.host_bytes.items()}
        return taken | host_figures(row, above["training"], above["setup"])


def host_figures(row: Mapping[str, Any], training_bytes: int, setup_bytes: int) -> dict[str, float]:
    """Peaks of host memory above an empty process: GiB until the engine stood (`host_setup_gib`),
    since then, and of all; and bytes of all a parameter with block inputs apart, by all parameters
    that the row trains and by those on the host there."""
    apart_bytes = row.get("block_inputs_on_host_gib", 0.0) * GIB
    host_bytes = max(training_bytes, setup_bytes)
    figures = {
        "host_gib": round(host_bytes / GIB, 2),
        "host_setup_gib": round(setup_bytes / GIB, 2),
        "host_training_gib": round(training_bytes / GIB, 2),
    }
    for which in ("trained", "on_host"):
        if row.get(f"parameters_{which}"):
            each = (host_bytes - apart_bytes) / row[f"parameters_{which}"]
            figures[f"host_bytes_per_{which}"] = round(each, 3)
    return figures
