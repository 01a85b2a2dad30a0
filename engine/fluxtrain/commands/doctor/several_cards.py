"""Find what holds several cards back together. Pure functions of a probe."""

from __future__ import annotations

from collections.abc import Iterator

from fluxtrain.events.answers.machine import Finding, ProbeAnswer, card_rate_name
from fluxtrain.measure.probe.cards import WRONG
from fluxtrain.units import rate_text

ALIKE = 0.8  # of the fastest card's bus: a slower one is in another slot
SHARED = 0.75  # of what the cards reach alone, added up: less is a shared link


def several_cards_findings(probe: ProbeAnswer) -> Iterator[Finding]:
    """Yield all findings about cards beside each other, in no order."""
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
    """Bytes a second to each card whose bus was measured."""
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
