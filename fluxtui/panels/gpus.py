"""The GPUs of this machine as lines: in full, a line each, or several a line, as room allows."""

from __future__ import annotations

from collections.abc import Sequence

from fluxtrain.units import UNKNOWN, bytes_text
from fluxtui.panels.panel import whole_share
from fluxtui.plots.bars import meter
from fluxtui.state.machine_sample import GpuSample
from fluxtui.widgets.spans import Line, dropped_to_fit, fitted, joined, width_of

TRAINERS = "▸"  # stands before the GPU that the trainer uses
CELL_GAP = "  "


def gpu_lines(gpus: Sequence[GpuSample], width: int, height: int) -> list[Line]:
    """Show as much of every GPU as `height` lines have room for; use at least two lines."""
    if len(gpus) == 1:
        return _in_full(gpus[0], "GPU", width)
    if 2 * len(gpus) <= height:
        return [line for gpu in gpus for line in _in_full(gpu, label(gpu), width)]
    if len(gpus) <= height:
        return [_meter(gpu, label(gpu), width) for gpu in gpus]
    return packed(gpus, width)


def packed(gpus: Sequence[GpuSample], width: int) -> list[Line]:
    """Show use and memory of all GPUs, as many a line as fit."""
    cells = [short(gpu) for gpu in gpus]
    widest = max(map(width_of, cells))
    a_line = max(1, (width + len(CELL_GAP)) // (widest + len(CELL_GAP)))
    rows = [cells[i : i + a_line] for i in range(0, len(cells), a_line)]
    return [joined([fitted(cell, widest) for cell in row], CELL_GAP) for row in rows]


def short(gpu: GpuSample, name: str = "") -> Line:
    """Draw one GPU in a few cells: `▸G0 91% 24.0 GiB`."""
    return (
        (f"{name or label(gpu)} ", "accent" if gpu.has_trainer else "dim"),
        (whole_share(gpu.utilisation), "strong" if gpu.utilisation is not None else "dim"),
        (f" {bytes_text(gpu.memory_used_bytes)}", "warn" if gpu.throttled_by else "text"),
    )


def label(gpu: GpuSample) -> str:
    """Return the GPU's label: `▸G0` for one of the trainer's, ` G1` for another."""
    return f"{TRAINERS if gpu.has_trainer else ' '}G{gpu.index}"


def state_of(gpu: GpuSample, width: int) -> Line:
    """Show power, heat and clocks against their limits, and the cause of throttling."""
    return dropped_to_fit(
        [
            of_limit(gpu.power_w, gpu.power_limit_w, "W"),
            of_limit(gpu.temperature_c, None, "°C"),
            of_limit(gpu.clock_mhz, gpu.clock_limit_mhz, "MHz"),
            _throttle(gpu.throttled_by),
            (*of_limit(gpu.memory_clock_mhz, None, "MHz"), (" memory", "dim")),
        ],
        width,
    )


def of_limit(value: float | None, limit: float | None, unit: str) -> Line:
    """Write a value, its limit where there is one, and their unit."""
    text = UNKNOWN if value is None else f"{value:.0f}"
    most = "" if limit is None else f"/{limit:.0f}"
    return ((text, "dim" if value is None else "strong"), (f"{most} {unit}", "dim"))


def _in_full(gpu: GpuSample, name: str, width: int) -> list[Line]:
    return [_meter(gpu, name, width), state_of(gpu, width)]


def _meter(gpu: GpuSample, name: str, width: int) -> Line:
    used = gpu.memory_used_bytes
    note = UNKNOWN if used is None else f"{bytes_text(used)} used"
    return meter(name, gpu.utilisation, note, "device", width)


def _throttle(reasons: tuple[str, ...] | None) -> Line:
    if reasons is None:
        return (("throttling ", "dim"), (UNKNOWN, "dim"))
    if not reasons:
        return (("full speed", "good"),)
    return ((f"held back by {', '.join(reasons)}", "warn"),)
