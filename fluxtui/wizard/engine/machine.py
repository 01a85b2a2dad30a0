"""This machine as the wizard shows it."""

from __future__ import annotations

from collections.abc import Mapping

from fluxtrain.events.answers.machine import Disk, Gpu, Machine, ProbeAnswer, Rate, rate_value_text
from fluxtrain.units import UNKNOWN, bytes_text, duration_text, rate_text
from fluxtui.words import counted

Row = tuple[str, str, str]  # what, its value, how it is known

_RATES = {
    "h2d_pinned": "bus to the GPU",
    "d2h_pinned": "bus back",
    "h2d_both_ways": "to, both at once",
    "d2h_both_ways": "back, both at once",
    "h2d_pageable": "to, not pinned",
    "d2h_pageable": "back, not pinned",
    "gpu_matmul": "GPU arithmetic",
    "host_copy": "host memory copy",
    "adamw": "AdamW on the host",
    "adamw_8bit": "with 8-bit states",
    "cpu_matmul": "CPU arithmetic",
    "disk_write": "disk write",
    "disk_read": "disk read",
}


_OF_A_GPU = (
    "h2d_pinned", "d2h_pinned", "h2d_both_ways", "d2h_both_ways", "h2d_pageable", "d2h_pageable",
    "gpu_matmul",
)  # fmt: skip
_IN_PLAIN_WORDS = {  # of what the driver's library says
    "NVML Shared Library Not Found": "no NVIDIA driver is installed here",
    "Driver Not Loaded": "the NVIDIA driver is not loaded",
}


def machine_table(probe: ProbeAnswer) -> tuple[Row, ...]:
    """Return every measured rate, with its limit."""
    machine, rates = probe.machine, probe.rates
    return (
        *_host_rows(machine),
        *_gpu_rows(machine),
        *([_pinned_row(machine, rates)] if machine.gpus else []),
        _disk_row(probe.disk),
        *_rate_rows(rates, has_gpu=bool(machine.gpus)),
    )


def age_text(probe: ProbeAnswer) -> str:
    """Tell how old the rates are."""
    return f"rates measured {duration_text(probe.age_s)} ago"


def machine_lines(probe: ProbeAnswer) -> list[str]:
    """List one fact a line, the most telling first; what was not measured is left out."""
    machine, disk = probe.machine, probe.disk
    lines = [f"{counted(machine.cores, 'core')} ({machine.instruction_set})"]
    if machine.memory_total_bytes:
        free = bytes_text(machine.memory_available_bytes)
        lines.append(f"{bytes_text(machine.memory_total_bytes)} memory, {free} free")
    lines += [f"{_name(gpu)} {bytes_text(gpu.memory_total_bytes)}" for gpu in machine.gpus] or [
        "no GPU"
    ]
    lines += _rate_pairs(probe)
    if disk.free_bytes:
        lines.append(f"{bytes_text(disk.free_bytes)} free disk")
    return lines


def machine_warnings(probe: ProbeAnswer) -> list[str]:
    """List what will slow a run down or take memory away from it."""
    disk = probe.disk
    warnings = [
        f"programs that use GPU {gpu.index} besides: {len(gpu.other_processes)}; what they "
        "take later is missing then"
        for gpu in probe.machine.gpus
        if gpu.other_processes
    ]
    if disk.in_memory:
        warnings.append(f"{disk.path} lies in host memory: checkpoints take it away")
    if disk.on_network:
        warnings.append(f"{disk.path} is over the network: checkpoints may be slow")
    return warnings


def _host_rows(machine: Machine) -> list[Row]:
    quota, limit = machine.cpu_quota, machine.memory_limit_bytes
    name = machine.cpu_name or UNKNOWN
    held = f"of {bytes_text(machine.memory_total_bytes)}; no limit for this process"
    if limit is not None:
        installed = bytes_text(machine.memory_installed_bytes)
        held = f"limited to {bytes_text(limit)} (cgroup); {installed} installed"
    return [
        (
            "cores",
            f"{machine.cores} ({machine.instruction_set})",
            name if quota is None else f"{name}; limited to {quota:g} (cgroup)",
        ),
        ("host memory", f"{bytes_text(machine.memory_available_bytes)} free", held),
    ]


def _gpu_rows(machine: Machine) -> list[Row]:
    if not machine.gpus:
        return [("GPU", "none", _reason(machine.unknown.get("gpus", "none is visible to us")))]
    rows: list[Row] = []
    for gpu in machine.gpus:
        name, total = f"GPU {gpu.index}", bytes_text(gpu.memory_total_bytes)
        rows.append(
            (name, f"{bytes_text(gpu.memory_free_bytes)} free", f"of {total}; {_name(gpu)}")
        )
        rows.append((f"{name} users", *_users(gpu)))
    return rows


def _name(gpu: Gpu) -> str:
    return gpu.name or "NVIDIA GPU"


def _users(gpu: Gpu) -> tuple[str, str]:
    others = gpu.other_processes
    if others is None:
        return UNKNOWN, gpu.unknown.get("other_processes", "the driver does not say")
    if not others:
        return "none", "no other program holds memory of it"
    named = ", ".join(f"{one.pid} ({bytes_text(one.used_bytes)})" for one in others[:4])
    return counted(len(others), "other"), f"process {named}"


def _pinned_row(machine: Machine, rates: Mapping[str, Rate]) -> Row:
    limit, pin = machine.memlock_limit_bytes, rates.get("pin")
    allowed = "no limit" if limit is None else f"limit {bytes_text(limit)}"
    if pin is None:
        return ("pinnable", allowed, "not tried")
    speed = f"pinned at {rate_text(pin.per_s)}; " if pin.per_s else ""
    return ("pinnable", allowed, f"{speed}{_reason(pin.how)}")


def _disk_row(disk: Disk) -> Row:
    notes = filter(None, (disk.path, disk.file_system))
    return ("disk", f"{bytes_text(disk.free_bytes)} free", ", ".join(notes))


def _rate_rows(rates: Mapping[str, Rate], has_gpu: bool) -> list[Row]:
    """Draw measured rates; rates missing for one reason share a row."""
    rows: list[Row] = []
    missing: dict[str, list[str]] = {}
    for name, title in _RATES.items():
        rate = rates.get(name)
        if rate is None or (name in _OF_A_GPU and not has_gpu):
            continue
        if rate.per_s:
            rows.append((title, rate_value_text(name, rate.per_s), rate.how))
        else:
            missing.setdefault(rate.how, []).append(title)
    for why, titles in missing.items():
        rows.append(("not measured", UNKNOWN, f"{'; '.join(titles)}: {_reason(why)}"))
    return rows


def _reason(how: str) -> str:
    why = how.removeprefix("not measured: ")
    return _IN_PLAIN_WORDS.get(why.removeprefix("NVML says: "), why)


def _rate_pairs(probe: ProbeAnswer) -> list[str]:
    """Return the rates that decide about streaming, as far as they were measured."""
    pairs = (
        ("host copy {}", "host_copy"),
        ("bus {} to the GPU, {} back", "h2d_pinned", "d2h_pinned"),
        ("disk {} write, {} read", "disk_write", "disk_read"),
    )
    return [
        text.format(*(rate_text(probe.rate(name)) for name in names))
        for text, *names in pairs
        if all(probe.rate(name) for name in names)
    ]
