"""Several cards as rows for people: which is which, how fast all are, what passes between them."""

from __future__ import annotations

from collections.abc import Iterator

from fluxtrain.client.machine import TOGETHER, Card, card_rate_name, peer_name, rate_value_text
from fluxtrain.client.probe import ProbeAnswer
from fluxtrain.hardware.cards.peers import NO_ACCESS, WRONG
from fluxtrain.units import UNKNOWN, bytes_text, rate_text

Row = tuple[str, str, str]


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
    """All pairs: those of one kind together."""
    kinds: dict[str, list[str]] = {}
    numbers = [card.index for card in probe.cards]
    rates: dict[str, list[float]] = {}
    for source in numbers:
        for target in numbers:
            found = probe.rates.get(peer_name(source, target))
            if source == target or found is None:
                continue
            kind = "checked copies" if found.per_s else _kind(found.how)
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


def _kind(how: str) -> str:
    return NO_ACCESS if how == NO_ACCESS else WRONG if how.startswith(WRONG) else how
