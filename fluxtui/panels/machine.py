"""The machine as the app sees it itself, alive also when the trainer is silent."""

from __future__ import annotations

from fluxtrain.units import UNKNOWN, bytes_text
from fluxtui.panels.panel import Panel, pair, stale_note
from fluxtui.state.machine import GpuProcess, GpuSample, MachineSample
from fluxtui.state.view import View
from fluxtui.widgets.bars import gauge
from fluxtui.widgets.spans import Line, dropped_to_fit, spread

SIDE_BY_SIDE = 56  # cells from which processor and memory share a line
NOTE_CELLS = 13
BYTES_CELLS = 10


def heading(view: View, width: int) -> Line:
    """What one should know at once: throttling, others on the GPU, or why there is nothing."""
    if view.link.replay:
        return (("not part of a recording", "dim"),)
    sample = view.machine
    if sample is None and view.machine_sample is not None:
        return stale_note(view.wall_s - view.machine_sample.wall_s)
    gpu = sample.gpu if sample else None
    if gpu is None:
        return ()
    parts: list[Line] = []
    if gpu.throttled_by:
        parts.append(((f"held back by {', '.join(gpu.throttled_by)}", "warn"),))
    if gpu.others:
        word = "other" if len(gpu.others) == 1 else "others"
        parts.append(((f"{len(gpu.others)} {word} on the GPU", "warn"),))
    return dropped_to_fit([*parts, ((gpu.name, "dim"),)], width)


def body(view: View, width: int, height: int) -> list[Line]:
    """GPU first where there is one, then processor, memory, trainer, other processes."""
    sample = view.machine
    cpu = ("CPU", sample.cpu if sample else None, _cores(sample))
    ram = ("RAM", _used_share(sample), _used_text(sample))
    gpu = sample.gpu if sample else None
    if gpu is None:
        lines = [_meter(*cpu, "info", width), _meter(*ram, "info", width)]
        return [*lines, _trainer(sample, width)][:height]
    lines = gpu_lines(gpu, width)
    if width >= SIDE_BY_SIDE:
        half = (width - 3) // 2
        left, right = _meter(*cpu, "info", half), _meter(*ram, "info", width - 3 - half)
        lines.append((*left, ("   ", "text"), *right))
    else:
        lines += [_meter(*cpu, "info", width), _meter(*ram, "info", width)]
    lines.append(_trainer(sample, width))
    lines += [_process(one, width) for one in gpu.processes or ()]
    return lines[:height]


def gpu_lines(gpu: GpuSample, width: int) -> list[Line]:
    """Utilisation, then power, heat and clocks against their limits."""
    share = gpu.memory_used_bytes
    note = UNKNOWN if share is None else f"{bytes_text(share)} used"
    return [
        _meter("GPU", gpu.utilisation, note, "device", width),
        dropped_to_fit(
            [
                _of(gpu.power_w, gpu.power_limit_w, "W"),
                _of(gpu.temperature_c, None, "°C"),
                _of(gpu.clock_mhz, gpu.clock_limit_mhz, "MHz"),
                _throttle(gpu.throttled_by),
                (*_of(gpu.memory_clock_mhz, None, "MHz"), (" memory", "dim")),
            ],
            width,
        ),
    ]


def _of(value: float | None, limit: float | None, unit: str) -> Line:
    """A value, its limit where there is one, and their unit."""
    text = UNKNOWN if value is None else f"{value:.0f}"
    most = "" if limit is None else f"/{limit:.0f}"
    return ((text, "dim" if value is None else "strong"), (f"{most} {unit}", "dim"))


def _throttle(reasons: tuple[str, ...] | None) -> Line:
    if reasons is None:
        return (("throttling ", "dim"), (UNKNOWN, "dim"))
    if not reasons:
        return (("full speed", "good"),)
    return ((f"held back by {', '.join(reasons)}", "warn"),)


def _process(one: GpuProcess, width: int) -> Line:
    """Who holds how much of the GPU."""
    who = "trainer" if one.is_trainer else one.name or "name not visible"
    left: Line = (("on GPU ", "dim"), (who, "text" if one.is_trainer else "warn"))
    pid: Line = ((f"process {one.pid}", "dim"),)
    room = width - BYTES_CELLS
    held: Line = ((f"{bytes_text(one.memory_bytes):>{BYTES_CELLS}}", "text"),)
    return spread(dropped_to_fit([left, pid], room), held, width)


def _meter(label: str, share: float | None, note: str, role: str, width: int) -> Line:
    percent = f"{share * 100:3.0f}%" if share is not None else f"{UNKNOWN:>4}"
    right: Line = (
        (f" {percent}", "strong" if share is not None else "dim"),
        (f"  {note:>{NOTE_CELLS}}", "dim"),
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
