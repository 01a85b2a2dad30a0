"""The machine as the app sees it itself, alive also when the trainer is silent."""

from __future__ import annotations

from fluxtrain.units import UNKNOWN, bytes_text
from fluxtui.panels.panel import Panel, pair
from fluxtui.state.machine import GpuSample, MachineSample
from fluxtui.state.view import View
from fluxtui.widgets.bars import gauge
from fluxtui.widgets.spans import Line, dropped_to_fit, spread


def heading(view: View, width: int) -> Line:
    """Says why there is nothing to see."""
    if view.link.replay:
        return (("not part of a recording", "dim"),)
    return ()


def body(view: View, width: int, height: int) -> list[Line]:
    """Processor, memory, trainer, GPU: a line each."""
    sample = view.machine
    lines = [
        _meter("CPU", sample.cpu if sample else None, _cores(sample), "info", width),
        _meter("RAM", _used_share(sample), _used_text(sample), "info", width),
        _trainer(sample, width),
    ]
    gpu = sample.gpu if sample else None
    if gpu is not None:
        lines[2:2] = gpu_lines(gpu, width)
    return lines[:height]


def gpu_lines(gpu: GpuSample, width: int) -> list[Line]:
    """Utilisation, then power and temperature."""
    power = "" if gpu.power_w is None else f"{gpu.power_w:.0f} W"
    heat = "" if gpu.temperature_c is None else f"{gpu.temperature_c:.0f} °C"
    return [_meter("GPU", gpu.utilisation, " ".join(filter(None, (power, heat))), "device", width)]


def _meter(label: str, share: float | None, note: str, role: str, width: int) -> Line:
    percent = f"{share * 100:3.0f}%" if share is not None else f"{UNKNOWN:>4}"
    right: Line = (
        (f" {percent}", "strong" if share is not None else "dim"),
        (f"  {note:>13}", "dim"),
    )
    room = width - 4 - sum(len(text) for text, _ in right)
    return spread(((f"{label} ", "dim"), *gauge(share, room, role)), right, width)


def _cores(sample: MachineSample | None) -> str:
    return f"{sample.cores} cores" if sample else ""


def _used_share(sample: MachineSample | None) -> float | None:
    if sample is None or sample.memory_used_bytes is None or not sample.memory_total_bytes:
        return None
    return sample.memory_used_bytes / sample.memory_total_bytes


def _used_text(sample: MachineSample | None) -> str:
    if sample is None or sample.memory_used_bytes is None:
        return ""
    return f"of {bytes_text(sample.memory_total_bytes)}"


def _trainer(sample: MachineSample | None, width: int) -> Line:
    cores = sample.trainer_cpu if sample else None
    return dropped_to_fit(
        [
            pair("trainer", bytes_text(sample.trainer_rss_bytes if sample else None), "text"),
            (
                *pair("", f"{cores:.1f}" if cores is not None else UNKNOWN, "text")[1:],
                (" cores", "dim"),
            ),
        ],
        width,
    )


PANEL = Panel("machine", "Machine", body, heading, about="CPU, memory and GPU as the app sees them")
