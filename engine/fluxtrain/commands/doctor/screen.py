"""Show a report as one screen of text, 80 columns wide. No torch."""

from __future__ import annotations

import textwrap

from fluxtrain.events.answers.machine import (
    DoctorAnswer,
    Gpu,
    Machine,
    ProbeAnswer,
    RankCores,
    rate_value_text,
)
from fluxtrain.measure.probe.table import age_text, card_lines, link_text, no_gpu_reason
from fluxtrain.units import UNKNOWN, bytes_text, rate_text

COLUMNS = 80
_LABEL = 10
_VERDICTS = {True: "pass", False: "FAIL", None: "none"}


def screen(report: DoctorAnswer) -> str:
    """Return the verdict, the measurements, what to change, the self-tests and the versions."""
    lines = [_verdict(report), *_measured(report.probe)]
    if report.ranks:
        lines.append("processes, were there one for each card, and the cores of each:")
    for rank, mine in enumerate(report.ranks):
        lines += _wrapped(f"rank {rank}", _rank_text(mine))
    if report.findings:
        lines.append("findings, the most useful first:")
    for number, finding in enumerate(report.findings, start=1):
        lines += _wrapped(f"{number:2}", f"{finding.name}: {finding.numbers}", 4)
        lines += _wrapped("   ->", finding.cure, 6)
    lines.append("self-tests, bit for bit:")
    for test in report.self_tests:
        lines += _wrapped(f"{_VERDICTS[test.passed]:>6}", f"{test.name}: {test.detail}", 8)
    told = ", ".join(
        version if name == "os" else f"{name} {version}"
        for name, version in report.versions.items()
        if name != "cpu"  # its line is above
    )
    return "\n".join([*lines, *_wrapped("versions", told)])


def _verdict(report: DoctorAnswer) -> str:
    ran = [test for test in report.self_tests if test.passed is not None]
    passed = len(ran) - len(report.failed)
    count = len(report.findings)
    advice = f"{count} finding{'s' * (count != 1)}" if count else "nothing to change"
    return f"fluxtrain doctor: {passed} of {len(ran)} self-tests pass, {advice}"


def _measured(probe: ProbeAnswer) -> list[str]:
    machine = probe.machine
    lines = _wrapped("processor", _processor_text(probe))
    lines += _wrapped("memory", _memory_text(probe))
    for gpu in machine.gpus:
        lines += _wrapped(f"GPU {gpu.index}", _gpu_text(gpu))
    if machine.gpus:
        lines += _wrapped("bus", _bus_text(probe))
        for what, text in card_lines(probe):
            lines += _wrapped(what, text)
    else:
        lines += _wrapped("GPU", f"none: {no_gpu_reason(machine)}")
    lines += _wrapped("disk", _disk_text(probe))
    again = ", --fresh measures again" if probe.from_cache else ""
    return lines + _wrapped("rates", f"{age_text(probe)}{again}")


def _rank_text(rank: RankCores) -> str:
    spans: list[list[int]] = []
    for core in rank.cores:
        if not spans or core != spans[-1][1] + 1:
            spans.append([core, core])
        spans[-1][1] = core
    cores = ",".join(str(a) if a == b else f"{a}-{b}" for a, b in spans)
    threads = _count(rank.update_threads, "update thread")
    return f"cores {cores} of NUMA node {rank.node}, {threads}"


def _processor_text(probe: ProbeAnswer) -> str:
    machine = probe.machine
    parts = [
        f"{machine.cpu_name or UNKNOWN}: {_count(machine.cores, 'core')}",
        machine.instruction_set,
        f"AdamW {_rate(probe, 'adamw')}",
        f"matmul {_rate(probe, 'cpu_matmul')}",
        f"power {machine.power_mode or 'unknown'}",
    ]
    return ", ".join(parts)


def _memory_text(probe: ProbeAnswer) -> str:
    machine = probe.machine
    limit = machine.memory_limit_bytes
    parts = [
        bytes_text(machine.memory_total_bytes),
        f"{bytes_text(machine.memory_available_bytes)} available",
        "no limit" if limit is None else f"limited to {bytes_text(limit)}",
        f"copies {_rate(probe, 'host_copy')}",
        f"page locks {_locks(machine)}",
        f"huge pages {machine.huge_pages or 'unknown'}",
        _count(machine.numa_nodes or 1, "NUMA node"),
    ]
    return ", ".join([*parts, "WSL2"] if machine.wsl else parts)


def _gpu_text(gpu: Gpu) -> str:
    parts = [
        gpu.name or gpu.unknown.get("name", UNKNOWN),
        f"{bytes_text(gpu.memory_free_bytes)} of {bytes_text(gpu.memory_total_bytes)} free",
        f"capability {gpu.compute_capability or UNKNOWN}",
        link_text(gpu.pcie_generation, gpu.pcie_width),
    ]
    return ", ".join(parts)


def _bus_text(probe: ProbeAnswer) -> str:
    """Return each rate as it was measured, for the first card."""
    return (
        f"pinned {_rate(probe, 'h2d_pinned')} up and {_rate(probe, 'd2h_pinned')} down, both at "
        f"once {_rate(probe, 'h2d_both_ways')} and {_rate(probe, 'd2h_both_ways')}, pageable "
        f"{_rate(probe, 'h2d_pageable')} and {_rate(probe, 'd2h_pageable')}, locking "
        f"{_rate(probe, 'pin')}, matmul {_rate(probe, 'gpu_matmul')}"
    )


def _disk_text(probe: ProbeAnswer) -> str:
    disk = probe.disk
    parts = [
        disk.file_system or "unknown file system",
        f"{bytes_text(disk.free_bytes)} free",
        f"writes {rate_text(probe.rate('disk_write'))}",
        f"reads {rate_text(probe.rate('disk_read'))}",
    ]
    parts += ["in memory"] if disk.in_memory else []
    return ", ".join([*parts, "over the network"] if disk.on_network else parts)


def _locks(machine: Machine) -> str:
    limit = machine.memlock_limit_bytes
    return "unlimited" if limit is None else bytes_text(limit)


def _rate(probe: ProbeAnswer, name: str) -> str:
    return rate_value_text(name, probe.rate(name))


def _count(count: int, what: str) -> str:
    return f"{count} {what}{'s' * (count != 1)}"


def _wrapped(label: str, text: str, indent: int = _LABEL) -> list[str]:
    """Wrap `text` behind `label`; further lines are indented to the start of the text."""
    return textwrap.wrap(
        text,
        COLUMNS,
        initial_indent=f"{label:<{indent}}",
        subsequent_indent=" " * indent,
        break_long_words=False,
        break_on_hyphens=False,
    )
