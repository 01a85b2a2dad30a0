"""This machine as the wizard shows it, read from `fluxtrain probe --json`."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping
from typing import Any

from fluxtrain.units import UNKNOWN, bytes_text, count_text, duration_text, rate_text
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


_NEED_A_GPU = ("the bus to a GPU and back", "GPU arithmetic")
_IN_PLAIN_WORDS = {  # of what the driver's library says
    "NVML Shared Library Not Found": "no NVIDIA driver is installed here",
    "Driver Not Loaded": "the NVIDIA driver is not loaded",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class MachineFacts:
    """A probe in words."""

    rows: tuple[Row, ...]
    warnings: tuple[str, ...]
    lines: tuple[str, ...]  # for a footer, the most telling first
    measured_at_s: float | None  # Unix time

    def age_text(self, now_s: float | None = None) -> str:
        """How old the rates are."""
        if self.measured_at_s is None:
            return "the rates were not measured"
        now_s = time.time() if now_s is None else now_s
        return f"rates measured {duration_text(max(0.0, now_s - self.measured_at_s))} ago"


def read_machine_facts(probe: Mapping[str, Any]) -> MachineFacts:
    """The engine's answer as a value; what it does not say is left out or "-"."""
    machine, disk, rates = (_table(probe, name) for name in ("machine", "disk", "rates"))
    return MachineFacts(
        rows=(
            *_host_rows(machine),
            *_gpu_rows(machine),
            *_pinned_rows(machine, rates),
            *_disk_rows(disk),
            *_rate_rows(rates, has_gpu=bool(machine.get("gpus") or not machine)),
        ),
        warnings=_warnings(machine, disk),
        lines=tuple(machine_lines(probe)),
        measured_at_s=probe.get("measured_at_s"),
    )


def machine_lines(probe: Mapping[str, Any]) -> list[str]:
    """One fact a line, the most telling first; what was not measured is left out."""
    machine, disk = _table(probe, "machine"), _table(probe, "disk")
    lines = []
    if machine.get("cores"):
        lines.append(
            f"{counted(machine['cores'], 'core')} ({machine.get('instruction_set', UNKNOWN)})"
        )
    if machine.get("memory_total_bytes"):
        free = bytes_text(machine.get("memory_available_bytes"))
        lines.append(f"{bytes_text(machine['memory_total_bytes'])} memory, {free} free")
    if machine:
        lines += [_gpu(gpu) for gpu in machine.get("gpus") or ()] or ["no GPU"]
    lines += _rate_pairs(_table(probe, "rates"))
    if disk.get("free_bytes"):
        lines.append(f"{bytes_text(disk['free_bytes'])} free disk")
    return lines


def _host_rows(machine: Mapping[str, Any]) -> list[Row]:
    if not machine:
        return []
    quota, limit = machine.get("cpu_quota"), machine.get("memory_limit_bytes")
    installed = bytes_text(machine.get("memory_installed_bytes"))
    cores = f"{machine.get('cores', UNKNOWN)} ({machine.get('instruction_set', UNKNOWN)})"
    name = machine.get("cpu_name") or UNKNOWN
    free = f"{bytes_text(machine.get('memory_available_bytes'))} free"
    held = f"of {bytes_text(machine.get('memory_total_bytes'))}; no limit for this process"
    if limit is not None:
        held = f"limited to {bytes_text(limit)} (cgroup); {installed} installed"
    return [
        ("cores", cores, name if quota is None else f"{name}; limited to {quota:g} (cgroup)"),
        ("host memory", free, held),
    ]


def _gpu_rows(machine: Mapping[str, Any]) -> list[Row]:
    if not machine:
        return []
    unknown = _table(machine, "unknown")
    gpus = machine.get("gpus") or ()
    if not gpus:
        return [("GPU", "none", _reason(str(unknown.get("gpus") or "none is visible to us")))]
    rows: list[Row] = []
    for gpu in gpus:
        free, total = gpu.get("memory_free_bytes"), gpu.get("memory_total_bytes")
        name = f"GPU {gpu.get('index', 0)}"
        card = gpu.get("name") or "NVIDIA GPU"
        rows.append((name, f"{bytes_text(free)} free", f"of {bytes_text(total)}; {card}"))
        rows.append((f"{name} users", *_users(gpu)))
    return rows


def _users(gpu: Mapping[str, Any]) -> tuple[str, str]:
    others = gpu.get("other_processes")
    if others is None:
        why = _table(gpu, "unknown").get("other_processes", "the driver does not say")
        return UNKNOWN, str(why)
    if not others:
        return "none", "no other program holds memory of it"
    named = ", ".join(f"{one['pid']} ({bytes_text(one.get('used_bytes'))})" for one in others[:4])
    return counted(len(others), "other"), f"process {named}"


def _pinned_rows(machine: Mapping[str, Any], rates: Mapping[str, Any]) -> list[Row]:
    if not machine:
        return []
    limit, pin = machine.get("memlock_limit_bytes"), _table(rates, "pin")
    allowed = "no limit" if limit is None else f"limit {bytes_text(limit)}"
    if not machine.get("gpus"):
        return [("pinnable", "not needed", f"memory is page-locked for a GPU alone; {allowed}")]
    speed = f"pinned at {rate_text(pin['per_s'])}; " if pin.get("per_s") else ""
    how = _reason(str(pin.get("how", ""))) or "not tried"
    return [("pinnable", allowed, f"{speed}{how}")]


def _disk_rows(disk: Mapping[str, Any]) -> list[Row]:
    if not disk:
        return []
    notes = [str(disk.get("path", "")), str(disk.get("file_system") or "")]
    return [("disk", f"{bytes_text(disk.get('free_bytes'))} free", ", ".join(filter(None, notes)))]


def _rate_rows(rates: Mapping[str, Any], has_gpu: bool) -> list[Row]:
    """Measured rates; those that are missing for one reason share a row."""
    rows: list[Row] = []
    missing: dict[str, list[str]] = {}
    for name, title in _RATES.items():
        rate = _table(rates, name)
        if rate.get("per_s"):
            rows.append((title, _rate(name, rate["per_s"]), str(rate.get("how", ""))))
        elif rate:
            missing.setdefault(str(rate.get("how", "")), []).append(title)
    for why, titles in missing.items():
        if not has_gpu and "GPU arithmetic" in titles:
            rows.append(("not measured", UNKNOWN, f"{', '.join(_NEED_A_GPU)}: there is none"))
        else:
            rows.append(("not measured", UNKNOWN, f"{'; '.join(titles)}: {_reason(why)}"))
    return rows


def _reason(how: str) -> str:
    why = how.removeprefix("not measured: ")
    return _IN_PLAIN_WORDS.get(why.removeprefix("NVML says: "), why)


def _rate(name: str, per_s: float) -> str:
    if name.endswith("matmul"):
        return f"{per_s / 1e12:.3g} TFLOP/s" if per_s >= 1e12 else f"{per_s / 1e9:.3g} GFLOP/s"
    return f"{count_text(per_s)} param/s" if name.startswith("adamw") else rate_text(per_s)


def _warnings(machine: Mapping[str, Any], disk: Mapping[str, Any]) -> tuple[str, ...]:
    warnings = []
    for gpu in machine.get("gpus") or ():
        if others := gpu.get("other_processes"):
            warnings.append(
                f"programs that use GPU {gpu.get('index', 0)} besides: {len(others)}; what they "
                "take later is missing then"
            )
    if disk.get("in_memory"):
        warnings.append(f"{disk.get('path')} lies in host memory: checkpoints take it away")
    if disk.get("on_network"):
        warnings.append(f"{disk.get('path')} is over the network: checkpoints may be slow")
    return tuple(warnings)


def _gpu(gpu: Mapping[str, Any]) -> str:
    return f"{gpu.get('name') or 'NVIDIA GPU'} {bytes_text(gpu.get('memory_total_bytes'))}"


def _rate_pairs(rates: Mapping[str, Any]) -> list[str]:
    """The rates that decide about streaming, as far as they were measured."""
    known = {
        name: rate["per_s"]
        for name, rate in rates.items()
        if isinstance(rate, Mapping) and rate.get("per_s")
    }
    pairs = (
        ("bus {} to the GPU, {} back", "h2d_pinned", "d2h_pinned"),
        ("disk {} write, {} read", "disk_write", "disk_read"),
    )
    lines = [
        text.format(rate_text(known[one]), rate_text(known[other]))
        for text, one, other in pairs
        if one in known and other in known
    ]
    if "host_copy" in known:
        lines.insert(0, f"host copy {rate_text(known['host_copy'])}")
    return lines


def _table(probe: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = probe.get(name)
    return value if isinstance(value, Mapping) else {}
