"""A probe as rows for people: (what, value, how it is known)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from fluxtrain.events.answers.machine import (
    TOGETHER,
    Card,
    Disk,
    Gpu,
    Machine,
    ProbeAnswer,
    Rate,
    card_rate_name,
    peer_name,
    rate_value_text,
)
from fluxtrain.measure.probe.others import beside_text
from fluxtrain.units import UNKNOWN, bytes_text, duration_text, rate_text

Row = tuple[str, str, str]


def probe_text(probe: ProbeAnswer) -> str:
    """Return the table in columns, and the age of the rates."""
    rows = probe_rows(probe)
    widths = [max(len(row[column]) for row in rows) for column in (0, 1)]
    lines = [f"{a:<{widths[0]}}  {b:>{widths[1]}}  {c}".rstrip() for a, b, c in rows]
    return "\n".join([*lines, f"rates {age_text(probe)}"])


def probe_rows(probe: ProbeAnswer) -> list[Row]:
    """Return every fact and rate."""
    return [
        *machine_rows(probe.machine),
        *card_rows(probe.cards),
        *disk_rows(probe.disk),
        *rate_rows(probe.rates),
    ]


def age_text(probe: ProbeAnswer) -> str:
    """Say when the rates were measured, and how long that took."""
    took = duration_text(probe.measuring_s)
    when = f"{duration_text(probe.age_s)} ago" if probe.from_cache else "now"
    return f"measured {when} in {took}{beside_text(probe.others_share, command='fluxtrain probe')}"


def machine_rows(machine: Machine) -> list[Row]:
    """Return processor, memory, system and cards; an unknown fact has its reason."""
    unknown = machine.unknown
    limit = machine.memory_limit_bytes
    memory_note = "" if limit is None else f"a limit, {_installed(machine)}"
    rows = [
        ("cores", str(machine.cores), _cores_note(machine)),
        ("instruction set", machine.instruction_set, ""),
        ("NUMA nodes", _text(machine.numa_nodes), unknown.get("numa_nodes", "")),
        (
            "host memory",
            bytes_text(machine.memory_total_bytes),
            unknown.get("memory_total_bytes", memory_note),
        ),
        (
            "host memory available",
            bytes_text(machine.memory_available_bytes),
            unknown.get("memory_available_bytes", ""),
        ),
        ("page locks", _limit_text(machine.memlock_limit_bytes), "RLIMIT_MEMLOCK"),
        ("huge pages", _text(machine.huge_pages), unknown.get("huge_pages", "")),
        (
            "power",
            _text(machine.power_mode),
            ", ".join(machine.power_saving) or unknown.get("power_mode", ""),
        ),
        ("WSL2", _yes(machine.wsl), unknown.get("wsl", "")),
    ]
    for gpu in machine.gpus:
        rows += _gpu_rows(gpu, machine.driver)
    if not machine.gpus:
        rows.append(("GPU", UNKNOWN, no_gpu_reason(machine)))
    return rows


def no_gpu_reason(machine: Machine) -> str:
    """Say why this process sees no card."""
    return machine.unknown.get("gpus", "CUDA_VISIBLE_DEVICES hides all GPUs")


def disk_rows(disk: Disk) -> list[Row]:
    """Return the rows of the disk that holds the runs."""
    kind = disk.file_system or disk.unknown.get("file_system", UNKNOWN)
    notes = [kind, disk.path]
    notes += ["takes host memory"] if disk.in_memory else []
    notes += ["over the network"] if disk.on_network else []
    free = disk.unknown.get("free_bytes")
    return [
        ("disk free", bytes_text(disk.free_bytes), ", ".join([*notes, free] if free else notes))
    ]


def rate_rows(rates: Mapping[str, Rate]) -> list[Row]:
    """Return one row a rate; rates that are missing for the same reason share a row."""
    reasons: dict[str, list[str]] = {}
    for name, rate in rates.items():
        if rate.per_s is None:
            reasons.setdefault(rate.how, []).append(name)
    rows = []
    for name, rate in rates.items():
        if rate.per_s is not None:
            rows.append((name.replace("_", " "), rate_value_text(name, rate.per_s), rate.how))
        elif names := reasons.pop(rate.how, None):
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            rows.append((names[0].replace("_", " ") + more, UNKNOWN, rate.how))
    return rows


def link_text(generation: int | None, width: int | None) -> str:
    """Name the link, such as PCIe 4 x16."""
    return f"PCIe {_text(generation)} x{_text(width)}"


def _gpu_rows(gpu: Gpu, driver: str | None) -> list[Row]:
    unknown = gpu.unknown
    name = gpu.name or unknown.get("name", UNKNOWN)
    link = link_text(gpu.pcie_generation, gpu.pcie_width)
    card = link_text(gpu.pcie_card_generation, gpu.pcie_card_width)
    link_note = unknown.get("pcie_width", "" if link == card else f"the card can do {card}")
    others = unknown.get("other_processes")
    if gpu.other_processes:
        count = len(gpu.other_processes)
        others = "1 other program uses it" if count == 1 else f"{count} other programs use it"
    power = "-" if gpu.power_limit_w is None else f"{gpu.power_limit_w:.0f} W"
    default = "" if gpu.power_default_w is None else f"sold with {gpu.power_default_w:.0f} W"
    return [
        (f"GPU {gpu.index}", bytes_text(gpu.memory_total_bytes), f"{name}, driver {driver}"),
        (f"GPU {gpu.index} free", bytes_text(gpu.memory_free_bytes), others or ""),
        (
            f"GPU {gpu.index} capability",
            gpu.compute_capability or UNKNOWN,
            unknown.get("compute_capability", "bf16" if gpu.bf16 else "no bf16"),
        ),
        (f"GPU {gpu.index} link", link, link_note),
        (f"GPU {gpu.index} power", power, unknown.get("power_limit_w", default)),
    ]


def _cores_note(machine: Machine) -> str:
    notes = [machine.cpu_name or machine.unknown.get("cpu_name", UNKNOWN)]
    if machine.cpu_quota is not None:
        notes.append(f"quota {machine.cpu_quota:g}")
    if machine.cores_installed is not None and machine.cores < machine.cores_installed:
        notes.append(f"{machine.cores_installed} installed")
    if machine.threads_wished is not None:
        notes.append(f"OMP_NUM_THREADS={machine.threads_wished}")
    return ", ".join(notes)


def _installed(machine: Machine) -> str:
    return f"{bytes_text(machine.memory_installed_bytes)} installed"


def _limit_text(limit: int | None) -> str:
    return "no limit" if limit is None else bytes_text(limit)


def _text(value: object) -> str:
    return UNKNOWN if value is None else str(value)


def _yes(value: bool | None) -> str:
    return UNKNOWN if value is None else ("yes" if value else "no")


# -- several cards


def card_rows(cards: tuple[Card, ...]) -> list[Row]:
    """Return a row for each card as torch counts them."""
    return [
        (
            f"card {card.index}",
            bytes_text(card.memory_free_bytes),
            f"free, {_which(card)}" + (f"; not usable: {card.unusable}" if card.unusable else ""),
        )
        for card in cards
    ]


def _which(card: Card) -> str:
    gpu = "a card that the driver does not name" if card.gpu is None else f"GPU {card.gpu}"
    node = "" if card.numa_node is None else f", NUMA node {card.numa_node}"
    return f"{card.name}, {gpu} of nvidia-smi{node}"


def card_lines(probe: ProbeAnswer) -> Iterator[tuple[str, str]]:
    """Yield (what, text) for a screen: each card's rates, all at once, and the peers."""
    for card in probe.cards:
        yield f"card {card.index}", f"{_which(card)}: {_rates(probe, card.index)}"
    if len(probe.cards) > 1:
        up, down, both = (rate_text(probe.rate(name)) for name in TOGETHER)
        yield "all cards", f"at once {up} up, {down} down, {both} both ways together"
        yield "peers", _peers(probe)


def _rates(probe: ProbeAnswer, card: int) -> str:
    up, down, matmul = (
        rate_value_text(name, probe.rate(card_rate_name(card, name)))
        for name in ("h2d_pinned", "d2h_pinned", "gpu_matmul")
    )
    return f"pinned {up} up and {down} down, matmul {matmul}"


def _peers(probe: ProbeAnswer) -> str:
    """Describe the rates between all pairs of cards, pairs of one kind together."""
    kinds: dict[str, list[str]] = {}
    numbers = [card.index for card in probe.cards]
    rates: dict[str, list[float]] = {}
    for source in numbers:
        for target in numbers:
            found = probe.rates.get(peer_name(source, target))
            if source == target or found is None:
                continue
            kind = "checked copies" if found.per_s else found.how
            kinds.setdefault(kind, []).append(f"{source} to {target}")
            if found.per_s:
                rates.setdefault(kind, []).append(found.per_s)
    parts = []
    for kind, pairs in kinds.items():
        known = rates.get(kind)
        slowest, fastest = (rate_text(min(known)), rate_text(max(known))) if known else ("", "")
        rate = f" {slowest}" if slowest == fastest else f" {slowest} to {fastest}"
        every = len(pairs) == len(numbers) * (len(numbers) - 1)
        named = "every pair" if every else ", ".join(pairs)
        parts.append(f"{named}: {kind}{rate if known else ''}")
    return "; ".join(parts) or UNKNOWN
