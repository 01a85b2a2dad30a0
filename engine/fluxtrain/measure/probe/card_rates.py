"""Measure each further card alone, and the buses of all cards at once.

The rates without a card's number are those of the first card. Cards behind one root port or one
switch share its lanes, so together they are slower than each alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from fluxtrain.events.answers.machine import TOGETHER, Rate, card_rate_name
from fluxtrain.measure.probe.bandwidth import (
    COPY_BYTES,
    LEAST_COPY_BYTES,
    bus_rates,
    matmul_rate,
)
from fluxtrain.measure.probe.copies import Copies, TorchCopies
from fluxtrain.measure.probe.rate import TOO_LITTLE, best_rate, failed
from fluxtrain.units import bytes_text

ONE_CARD = ("h2d_pinned", "d2h_pinned", "h2d_both_ways", "d2h_both_ways", "gpu_matmul")
LIMIT_S = 0.5
MATMUL_LIMIT_S = 0.75
REPEATS = 5


def further_card_names(cards: int) -> tuple[str, ...]:
    """Name the rates of all cards but the first."""
    return tuple(card_rate_name(card, name) for card in range(1, cards) for name in ONE_CARD)


def further_card_rates(cards: int, size_bytes: int = COPY_BYTES) -> dict[str, Rate]:
    """Measure bus and arithmetic of every card but the first, each while the others rest."""
    rates: dict[str, Rate] = {}
    for card in range(1, cards):
        try:
            with current(card):
                found = {
                    **bus_rates(f"cuda:{card}", LIMIT_S, size_bytes, pageable=False),
                    "gpu_matmul": matmul_rate(f"cuda:{card}", MATMUL_LIMIT_S),
                }
        except (RuntimeError, MemoryError) as error:  # this card's alone
            found = dict.fromkeys(ONE_CARD, failed(error))
        rates |= {card_rate_name(card, name): found[name] for name in ONE_CARD}
    return rates


@contextmanager
def current(card: int) -> Iterator[None]:
    """Make a card the one that streams and waiting without a number are of."""
    import torch

    with torch.cuda.device(card):
        yield


def rates_together(
    cards: int, size_bytes: int = COPY_BYTES, *, copies: Copies | None = None
) -> dict[str, Rate]:
    """Measure bytes a second of all cards at once, added up: up, down, and both ways."""
    copies = TorchCopies() if copies is None else copies
    found = copies.count()
    if found < cards:
        return dict.fromkeys(TOGETHER, Rate(None, f"not measured: torch has {found} cards"))
    size_bytes //= 2 * cards  # page-locked memory for all cards and both directions
    if size_bytes < LEAST_COPY_BYTES:
        return dict.fromkeys(TOGETHER, TOO_LITTLE)
    every = range(cards)
    ups = [(copies.on_card(card, size_bytes), copies.on_host(size_bytes), card) for card in every]
    downs = [(copies.on_host(size_bytes), copies.on_card(card, size_bytes), card) for card in every]
    how = f"{cards} cards at once, {bytes_text(size_bytes)} each"
    return {
        name: Rate(_rate(copies, some, size_bytes), how)
        for name, some in zip(TOGETHER, (ups, downs, [*ups, *downs]), strict=True)
    }


def _rate(copies: Copies, some: Sequence[tuple[Any, Any, int]], size_bytes: int) -> float:
    """Return the bytes a second of all these copies at once, until the last one ends."""
    cards = sorted({card for _, _, card in some})

    def all_at_once() -> None:
        for target, source, card in some:
            copies.copy(target, source, card)
        for card in cards:
            copies.wait(card)

    return best_rate(len(some) * size_bytes, all_at_once, repeats=REPEATS, limit_s=LIMIT_S)
