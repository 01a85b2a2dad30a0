"""This machine in a few words, read from `fluxtrain probe --json`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fluxtrain.units import bytes_text, rate_text


def machine_lines(probe: Mapping[str, Any]) -> list[str]:
    """One fact a line, the most telling first; what was not measured is left out."""
    machine, disk = _table(probe, "machine"), _table(probe, "disk")
    lines = []
    if machine.get("cores"):
        lines.append(f"{machine['cores']} cores ({machine.get('instruction_set', '-')})")
    if machine.get("memory_total_bytes"):
        free = bytes_text(machine.get("memory_available_bytes"))
        lines.append(f"{bytes_text(machine['memory_total_bytes'])} memory, {free} free")
    if machine:
        lines += [_gpu(gpu) for gpu in machine.get("gpus") or ()] or ["no GPU"]
    lines += _rates(_table(probe, "rates"))
    if disk.get("free_bytes"):
        lines.append(f"{bytes_text(disk['free_bytes'])} free disk")
    return lines


def _gpu(gpu: Mapping[str, Any]) -> str:
    return f"{gpu.get('name') or 'NVIDIA GPU'} {bytes_text(gpu.get('memory_total_bytes'))}"


def _rates(rates: Mapping[str, Any]) -> list[str]:
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
