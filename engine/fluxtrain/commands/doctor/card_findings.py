"""Find what holds back the cards and their slots. Pure functions of a probe."""

from __future__ import annotations

from collections.abc import Iterator

from fluxtrain.events.answers.machine import Finding, Gpu, ProbeAnswer, card_rate_name
from fluxtrain.measure.probe.bandwidth import PIN_BYTES
from fluxtrain.measure.probe.cards import WRONG
from fluxtrain.measure.probe.table import link_text
from fluxtrain.units import bytes_text, duration_text, rate_text

# PCI Express, bytes a second of one lane each way after its encoding (PCI-SIG).
LANE_BYTES_PER_S = {1: 0.25e9, 2: 0.5e9, 3: 0.985e9, 4: 1.969e9, 5: 3.938e9, 6: 7.563e9}
HEALTHY_LINK = 0.65  # of the link's rate: pinned copies reach 0.78 to 0.87 on sound machines
HEALTHY_BOTH_WAYS = 1.3  # times one way: two directions are two sets of wires
HEALTHY_POWER = 0.95
BUSY_SHARE = 0.05  # of a card's memory: a desktop's own windows take less
ALIKE = 0.8  # of the fastest card's bus: a slower one is in another slot
SHARED = 0.75  # of what the cards reach alone, added up: less is a shared link
EXAMPLE_PARAMETERS, EXAMPLE_TOKENS = 0.5e9, 2048  # a small model and a small batch


def card_findings(probe: ProbeAnswer) -> Iterator[Finding]:
    """Yield all findings about the cards, in no order."""
    if not probe.machine.gpus:
        yield _no_card(probe)
        return
    if probe.rate("gpu_matmul") is None:
        yield _unusable(probe)
        return
    yield from _page_locks(probe)
    for gpu in probe.machine.gpus:
        yield from _card(gpu)
    yield from _slot(probe)
    yield from _both_ways(probe)


def _no_card(probe: ProbeAnswer) -> Finding:
    per_s = probe.rate("cpu_matmul")
    speed = "an unknown time"
    if per_s is not None:
        step_s = 8 * EXAMPLE_PARAMETERS * EXAMPLE_TOKENS / per_s  # forward, recompute, backward
        speed = f"{duration_text(step_s)} a step of 2,048 tokens for 0.5 B parameters"
    return Finding(
        name="no GPU",
        level="note",
        numbers=f"the CPU computes, about {speed}",
        cure="train small models here, and large ones on a machine with an NVIDIA GPU",
    )


def _unusable(probe: ProbeAnswer) -> Finding:
    names = ", ".join(gpu.name or "NVIDIA GPU" for gpu in probe.machine.gpus)
    found = probe.rates.get("gpu_matmul")
    reason = "not measured" if found is None else found.how
    return Finding(
        name="GPU not usable",
        level="broken",
        numbers=f"{names}, driver {probe.machine.driver or 'unknown'}; {reason}",
        cure="install the CUDA build of torch for this driver (pytorch.org/get-started), or update "
        "the driver; if the card's memory is full, close other programs",
    )


def _page_locks(probe: ProbeAnswer) -> Iterator[Finding]:
    """Find a limit of page-locked memory: without page locks copies pass through a small buffer of
    the driver."""
    machine, pageable = probe.machine, probe.rate("h2d_pageable")
    limit, total = machine.memlock_limit_bytes, machine.memory_total_bytes
    cure = "allow it: `ulimit -l unlimited`, memlock in /etc/security/limits.conf, or `docker run "
    cure += "--ulimit memlock=-1`"
    cure += "; on WSL2 raise memory= in .wslconfig too" if machine.wsl else ""
    refused = next(
        (probe.rates[name] for name in ("pin", "h2d_pinned") if _refused(probe, name)), None
    )
    if refused is not None:
        pinned = probe.rate("h2d_pinned")
        yield Finding(
            name="pageable memory",
            level="slow",
            factor=pinned / pageable if pinned and pageable else 1.0,
            numbers=f"{refused.how}; copies to the GPU run at {rate_text(pageable)} instead of "
            f"{rate_text(pinned)}",
            cure=cure,
        )
    elif limit is not None and total is not None and PIN_BYTES <= limit < total // 2:
        yield Finding(
            name="page-lock limit",
            level="note",
            numbers=f"{bytes_text(limit)} of {bytes_text(total)} may be page-locked, if the driver "
            "obeys; the rest is copied as pageable memory",
            cure=cure,
        )


def _refused(probe: ProbeAnswer, name: str) -> bool:
    return name in probe.rates and probe.rates[name].per_s is None


def _card(gpu: Gpu) -> Iterator[Finding]:
    name = f"GPU {gpu.index}"
    total, free = gpu.memory_total_bytes, gpu.memory_free_bytes
    if total and free is not None and total - free > BUSY_SHARE * total:
        count = len(gpu.other_processes or ())
        several = f"{count} other programs hold" if count else "others hold"
        users = "1 other program holds" if count == 1 else several
        yield Finding(
            name=f"{name} shared",
            level="small",
            factor=total / max(free, 1),
            numbers=f"{users} {bytes_text(total - free)} of {bytes_text(total)}",
            cure="close them (`nvidia-smi` lists them), or drive the screen from another card",
        )
    limit, default = gpu.power_limit_w, gpu.power_default_w
    if limit and default and limit < HEALTHY_POWER * default:
        yield Finding(
            name=f"{name} power limit",
            level="slow",
            factor=default / limit,
            numbers=f"set to {limit:.0f} W, the card was sold with {default:.0f} W",
            cure=f"`sudo nvidia-smi -i {gpu.index} -pl {default:.0f}`",
        )
    if gpu.bf16 is False:
        yield Finding(
            name=f"{name} without bf16",
            level="note",
            numbers=f"compute capability {gpu.compute_capability}, bf16 needs 8.0: it is emulated",
            cure="leave model.dtype=auto, which takes float16 there, or a card from 2020 or later",
        )


def _slot(probe: ProbeAnswer) -> Iterator[Finding]:
    """Find a slow bus; it is measured for the first card.

    A link saves power while idle, so a narrow one counts only when the measured rate agrees.
    """
    gpu, measured = probe.machine.gpus[0], probe.rate("h2d_pinned")
    link = _link_bytes_per_s(gpu.pcie_generation, gpu.pcie_width)
    card = _link_bytes_per_s(gpu.pcie_card_generation, gpu.pcie_card_width)
    if link is None or (measured is not None and measured > link):
        return
    if card is not None and link < 0.9 * card:
        yield Finding(
            name="slot",
            level="slow",
            factor=card / link,
            numbers=f"{link_text(gpu.pcie_generation, gpu.pcie_width)} "
            f"({rate_text(link)}, measured {rate_text(measured)}); the card can do "
            f"{link_text(gpu.pcie_card_generation, gpu.pcie_card_width)} ({rate_text(card)})",
            cure="use the slot with the most lanes (usually the one next to the CPU), without a "
            "riser; look for its speed in the BIOS",
        )
    elif measured is not None and measured < HEALTHY_LINK * link:
        far = (probe.machine.numa_nodes or 1) > 1 and gpu.numa_node is not None
        bind = f"`numactl --cpunodebind={gpu.numa_node} --membind={gpu.numa_node}`, "
        yield Finding(
            name="bus",
            level="slow",
            factor=HEALTHY_LINK * link / measured,
            numbers=f"{rate_text(measured)} to the GPU; "
            f"{link_text(gpu.pcie_generation, gpu.pcie_width)} gives "
            f"{rate_text(HEALTHY_LINK * link)} or more on sound machines",
            cure=f"try {bind if far else ''}no other load on the bus, IOMMU in passthrough mode "
            "(iommu=pt), and ACS off",
        )


def _both_ways(probe: ProbeAnswer) -> Iterator[Finding]:
    one, back = probe.rate("h2d_pinned"), probe.rate("d2h_pinned")
    up, down = probe.rate("h2d_both_ways"), probe.rate("d2h_both_ways")
    if None in (one, back, up, down):
        return
    single, both = max(one or 0.0, back or 0.0), (up or 0.0) + (down or 0.0)
    if both < HEALTHY_BOTH_WAYS * single:
        yield Finding(
            name="both directions",
            level="slow",
            factor=HEALTHY_BOTH_WAYS * single / max(both, 1.0),
            numbers=f"{rate_text(both)} for copies both ways at once, {rate_text(single)} one way: "
            "gradients slow weights down",
            cure="fill all memory channels; keep the process on the GPU's NUMA node; in a virtual "
            "machine ask for a host without shared buses",
        )


def _link_bytes_per_s(generation: int | None, width: int | None) -> float | None:
    lane = LANE_BYTES_PER_S.get(generation or 0)
    return None if lane is None or not width else lane * width


# -- several cards ---------------------------------------------------------------------------------


def several_cards_findings(probe: ProbeAnswer) -> Iterator[Finding]:
    """Yield all findings that compare several cards, in no order."""
    if len(probe.cards) < 2:
        return
    for card in probe.cards:
        if card.unusable:
            yield Finding(
                name=f"card {card.index} not usable",
                level="small",
                numbers=f"{card.text}: {card.unusable.partition(': ')[0]}",
                cure=card.unusable.partition(": ")[2] or "leave it out with parallel.cards",
            )
    yield from _slow_slots(probe)
    yield from _shared_bus(probe)
    yield from _wrong_peers(probe)
    yield from _generations(probe)


def _up(probe: ProbeAnswer) -> dict[int, float]:
    """Return the bytes a second to each card whose bus was measured."""
    rates = {
        card.index: probe.rate(card_rate_name(card.index, "h2d_pinned")) for card in probe.cards
    }
    return {index: rate for index, rate in rates.items() if rate is not None}


def _slow_slots(probe: ProbeAnswer) -> Iterator[Finding]:
    rates = _up(probe)
    best = max(rates.values(), default=0.0)
    for index, rate in rates.items():
        if rate < ALIKE * best:
            yield Finding(
                name=f"slot of card {index}",
                level="slow",
                factor=best / rate,
                numbers=f"{rate_text(rate)} to card {index}, {rate_text(best)} to the fastest",
                cure="use a slot with as many lanes as the others', without a riser; until then "
                "blocks are dealt by what each card reaches",
            )


def _shared_bus(probe: ProbeAnswer) -> Iterator[Finding]:
    rates, together = _up(probe), probe.rate("cards_h2d")
    alone = sum(rates.values())
    if together is None or len(rates) < len(probe.cards) or together >= SHARED * alone:
        return
    yield Finding(
        name="shared bus",
        level="slow",
        factor=alone / together,
        numbers=f"all cards at once reach {rate_text(together)} up, each alone "
        f"{rate_text(alone)} in all",
        cure="the cards share a root port, a switch, or slow host memory: use slots of different "
        "root ports, and fill all memory channels",
    )


def _wrong_peers(probe: ProbeAnswer) -> Iterator[Finding]:
    wrong = [
        name.removeprefix("peer_").replace("_", " to ")
        for name, rate in probe.rates.items()
        if name.startswith("peer_") and rate.how == WRONG
    ]
    if wrong:
        yield Finding(
            name="peer access",
            level="broken",
            numbers=f"copies between cards arrive with other bytes: {', '.join(wrong)}",
            cure="FluxTrain copies through the host; for other programs set NCCL_P2P_DISABLE=1, or "
            "switch ACS and the IOMMU off in the BIOS",
        )


def _generations(probe: ProbeAnswer) -> Iterator[Finding]:
    without = [card.text for card in probe.cards if card.bf16 is False]
    if without and len(without) < len(probe.cards):
        yield Finding(
            name="cards of two generations",
            level="note",
            numbers=f"no bf16: {', '.join(without)}",
            cure="runs in bf16 leave these cards out: model.dtype=float16 trains on all of them",
        )
