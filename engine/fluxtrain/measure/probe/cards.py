"""Measure each further card alone, the buses of all cards at once, and copies between two.

The rates without a card's number are those of the first card. Cards behind one root port or one
switch share its lanes, so together they are slower than each alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import permutations
from typing import Any

from fluxtrain.events.answers.machine import TOGETHER, Rate, card_rate_name, peer_name
from fluxtrain.measure.probe.bandwidth import (
    COPY_BYTES,
    LEAST_COPY_BYTES,
    bus_rates,
    matmul_rate,
)
from fluxtrain.measure.probe.rate import TOO_LITTLE, best_rate, failed
from fluxtrain.units import MIB, bytes_text

ONE_CARD = ("h2d_pinned", "d2h_pinned", "h2d_both_ways", "d2h_both_ways", "gpu_matmul")
LIMIT_S = 0.5
MATMUL_LIMIT_S = 0.75
REPEATS = 5
PEER_BYTES = 128 * MIB
PEER_LIMIT_S = 0.25  # for a pair: eight cards have 56
NO_ACCESS = "no peer access: copies between them go through the host"
WRONG = "peer access gives wrong bytes"


def further_card_names(cards: int) -> tuple[str, ...]:
    """Name the rates of all cards but the first."""
    return tuple(card_rate_name(card, name) for card in range(1, cards) for name in ONE_CARD)


def further_card_rates(cards: int, size_bytes: int = COPY_BYTES) -> dict[str, Rate]:
    """Measure bus and arithmetic of every card but the first, each while the others rest."""
    import torch

    rates: dict[str, Rate] = {}
    for card in range(1, cards):
        try:
            with torch.cuda.device(card):
                found = {
                    **bus_rates(f"cuda:{card}", LIMIT_S, size_bytes, pageable=False),
                    "gpu_matmul": matmul_rate(f"cuda:{card}", MATMUL_LIMIT_S),
                }
        except (RuntimeError, MemoryError) as error:  # this card's alone
            found = dict.fromkeys(ONE_CARD, failed(error))
        rates |= {card_rate_name(card, name): found[name] for name in ONE_CARD}
    return rates


def rates_together(cards: int, size_bytes: int = COPY_BYTES) -> dict[str, Rate]:
    """Measure bytes a second of all cards at once, added up: up, down, and both ways."""
    import torch

    if torch.cuda.device_count() < cards:
        return dict.fromkeys(TOGETHER, _unseen())
    size_bytes //= 2 * cards  # page-locked memory for all cards and both directions
    if size_bytes < LEAST_COPY_BYTES:
        return dict.fromkeys(TOGETHER, TOO_LITTLE)

    def buffer(**how: Any) -> torch.Tensor:
        return torch.zeros(size_bytes, dtype=torch.uint8, **how)

    every = range(cards)
    ups = [(buffer(device=f"cuda:{card}"), buffer(pin_memory=True)) for card in every]
    downs = [(buffer(pin_memory=True), buffer(device=f"cuda:{card}")) for card in every]
    how = f"{cards} cards at once, {bytes_text(size_bytes)} each"
    some = zip(TOGETHER, (ups, downs, [*ups, *downs]), strict=True)
    return {name: Rate(_rate_at_once(copies, cards), how) for name, copies in some}


def _rate_at_once(copies: Sequence[tuple[Any, Any]], cards: int) -> float:
    """Return the bytes a second of all these copies at once, until the last one ends."""
    import torch

    make: Any = torch.cuda.Stream  # torch has no types for it
    streams = [make(device=(to if to.is_cuda else source).device) for to, source in copies]

    def wait() -> None:
        for card in range(cards):
            torch.cuda.synchronize(card)

    def all_at_once() -> None:
        for (to, source), stream in zip(copies, streams, strict=True):
            with torch.cuda.stream(stream):
                to.copy_(source, non_blocking=True)
        wait()

    wait()  # what fills the buffers runs on other streams
    work = sum(to.nbytes for to, _ in copies)
    return best_rate(work, all_at_once, repeats=REPEATS, limit_s=LIMIT_S)


def peer_names(cards: int) -> tuple[str, ...]:
    """Name the rates of all pairs of so many cards."""
    return tuple(peer_name(a, b) for a, b in permutations(range(cards), 2))


def peer_rates(cards: int) -> dict[str, Rate]:
    """Measure bytes a second from each card to each other one."""
    import torch

    if torch.cuda.device_count() < cards:
        return dict.fromkeys(peer_names(cards), _unseen())
    rates: dict[str, Rate] = {}
    for source, target in permutations(range(cards), 2):
        try:
            rate = peer_rate(source, target)
        except (RuntimeError, MemoryError) as error:  # of this pair alone
            rate = failed(error)
        rates[peer_name(source, target)] = rate
    return rates


def peer_rate(source: int, target: int) -> Rate:
    """Measure bytes a second between two cards, where bytes arrive as they left.

    A driver can say that two cards reach each other where the platform then delivers wrong bytes
    (an IOMMU in between, patched drivers), so a copy is compared before any is timed.
    """
    import torch

    from fluxtrain.core.device.multi_gpu_streams import reaches

    if not torch.cuda.can_device_access_peer(target, source):
        return Rate(None, NO_ACCESS)
    here, there = (torch.device("cuda", card) for card in (source, target))
    if not reaches(here, there):
        return Rate(None, WRONG)
    sent, arrived = (
        torch.zeros(PEER_BYTES, dtype=torch.uint8, device=device) for device in (here, there)
    )

    def copy() -> None:
        arrived.copy_(sent, non_blocking=True)
        for card in (source, target):
            torch.cuda.synchronize(card)

    rate = best_rate(PEER_BYTES, copy, repeats=REPEATS, limit_s=PEER_LIMIT_S)
    return Rate(rate, f"{bytes_text(PEER_BYTES)}, once compared byte for byte")


def _unseen() -> Rate:
    import torch

    return Rate(None, f"not measured: torch has {torch.cuda.device_count()} cards")
