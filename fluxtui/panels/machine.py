"""The machine as the app itself measures it, live also when the trainer is silent."""

from __future__ import annotations

from collections.abc import Sequence

from fluxtrain.units import UNKNOWN, bytes_text
from fluxtui.panels.gpus import TRAINERS, gpu_lines, of_limit, short
from fluxtui.panels.panel import Panel, pair, stale_note, whole_share
from fluxtui.plots.bars import meter
from fluxtui.state.machine_sample import GpuSample, GpuUser, MachineSample
from fluxtui.state.view import View
from fluxtui.widgets.spans import Line, dropped_to_fit, spread
from fluxtui.words import counted

SIDE_BY_SIDE = 56  # cells from which processor and memory share a line
BYTES_CELLS = 10


def heading(view: View, width: int) -> Line:
    """Warn of throttling and of other programs on the GPUs, or say why there is no sample."""
    if view.link.replay:
        return (("not part of a recording", "dim"),)
    sample = view.machine
    if sample is None and view.machine_sample is not None:
        return stale_note(view.monotonic_s - view.machine_sample.monotonic_s)
    gpus = sample.gpus if sample else ()
    if not gpus:
        return ()
    parts = [*_warnings(gpus), ((_names(gpus), "dim"),)]
    if len(gpus) > 1 and any(gpu.has_trainer for gpu in gpus):
        parts.append(((TRAINERS, "accent"), (" the trainer's", "dim")))
    return dropped_to_fit(parts, width)


def body(view: View, width: int, height: int) -> list[Line]:
    """Draw GPUs first, then processor, memory, trainer, other processes."""
    if height == 1:
        return [machine_line(view, width)]
    sample = None if view.link.replay else view.machine
    gpus = sample.gpus if sample else ()
    rest = [*_host(sample, width, bool(gpus)), _trainer(sample, width)]
    if not gpus:
        return rest[:height]
    lines = [*gpu_lines(gpus, width, max(2, height - len(rest))), *rest]
    for gpu in gpus:
        where = "on GPU" if len(gpus) == 1 else f"on G{gpu.index}"
        lines += [_process(one, where, width) for one in gpu.processes or ()]
    return lines[:height]


def machine_line(view: View, width: int) -> Line:
    """Show as much of the machine as fits one line, the most changing values first."""
    if view.link.replay:
        return (("machine ", "dim"), ("not part of a recording", "dim"))
    sample = view.machine
    if sample is None:
        old = view.machine_sample
        note: Line = ((UNKNOWN, "dim"),)
        if old is not None:
            note = stale_note(view.monotonic_s - old.monotonic_s)
        return (("machine ", "dim"), *note)
    gpus = sample.gpus
    parts = [short(gpu, "GPU" if len(gpus) == 1 else "") for gpu in gpus]
    parts += [*_host_in_short(sample, bool(gpus)), *_warnings(gpus)]
    if len(gpus) == 1:
        [gpu] = gpus
        parts += [of_limit(gpu.power_w, gpu.power_limit_w, "W")]
        parts += [of_limit(gpu.temperature_c, None, "°C")]
    if sample.trainer_rss_bytes is not None:
        parts.append(pair("trainer", bytes_text(sample.trainer_rss_bytes), "text"))
    return dropped_to_fit(parts, width)


def _host_in_short(sample: MachineSample, beside_gpus: bool) -> list[Line]:
    """Write processor and memory; with GPUs only their shares."""
    cpu = pair("CPU", whole_share(sample.cpu))
    if beside_gpus:
        return [cpu, pair("RAM", whole_share(_used_share(sample)))]
    ram = pair("RAM", bytes_text(sample.memory_used_bytes))
    return [
        (*cpu, (f" of {counted(sample.cores, 'core')}", "dim")),
        (*ram, (f" {_used_text(sample)}", "dim")),
    ]


def _warnings(gpus: Sequence[GpuSample]) -> list[Line]:
    """Say what throttles the GPUs, and which other programs use them."""
    reasons = list(dict.fromkeys(word for gpu in gpus for word in gpu.throttled_by or ()))
    others = {one.pid for gpu in gpus for one in gpu.others}
    parts: list[Line] = []
    if reasons:
        parts.append(((f"held back by {', '.join(reasons)}", "warn"),))
    if others:
        word = "other" if len(others) == 1 else "others"
        where = "the GPU" if len(gpus) == 1 else "the GPUs"
        parts.append(((f"{len(others)} {word} on {where}", "warn"),))
    return parts


def _names(gpus: Sequence[GpuSample]) -> str:
    """Name the GPUs: `NVIDIA H200`, `2 x NVIDIA H100`, or both kinds."""
    counts: dict[str, int] = {}
    for gpu in gpus:
        counts[gpu.name] = counts.get(gpu.name, 0) + 1
    return ", ".join(name if n == 1 else f"{n} x {name}" for name, n in counts.items())


def _host(sample: MachineSample | None, width: int, may_share: bool) -> list[Line]:
    """Draw processor and memory; below GPUs they share a line where it is wide enough."""
    cpu = ("CPU", sample.cpu if sample else None, counted(sample.cores, "core") if sample else "")
    ram = ("RAM", _used_share(sample), _used_text(sample))
    if not may_share or width < SIDE_BY_SIDE:
        return [meter(*cpu, "info", width), meter(*ram, "info", width)]
    half = (width - 3) // 2
    left, right = meter(*cpu, "info", half), meter(*ram, "info", width - 3 - half)
    return [(*left, ("   ", "text"), *right)]


def _process(one: GpuUser, where: str, width: int) -> Line:
    """Say which process holds how much of a GPU."""
    who = "trainer" if one.is_trainer else one.name or "name not visible"
    left: Line = ((f"{where} ", "dim"), (who, "text" if one.is_trainer else "warn"))
    pid: Line = ((f"process {one.pid}", "dim"),)
    room = width - BYTES_CELLS
    held: Line = ((f"{bytes_text(one.memory_bytes):>{BYTES_CELLS}}", "text"),)
    return spread(dropped_to_fit([left, pid], room), held, width)


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
    held = bytes_text(sample.trainer_rss_bytes if sample else None)
    parts: list[Line] = [pair("trainer", held, "text")]
    if cores is not None:
        parts.append(((f"{cores:.1f}", "text"), (" cores", "dim")))
    return dropped_to_fit(parts, width)


PANEL = Panel(
    "machine", "Machine", body, heading, about="processors and memory as the app sees them"
)
