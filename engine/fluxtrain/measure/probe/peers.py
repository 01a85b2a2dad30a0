"""Measure copies between every two cards, and check their bytes.

A driver can say that two cards reach each other where the platform then delivers wrong bytes (ACS
or an IOMMU in between, patched drivers). So no rate is told unless what arrived was compared, byte
for byte, with what was sent.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import permutations
from typing import Any

from fluxtrain.events.answers.machine import Rate, peer_name
from fluxtrain.measure.probe.copies import Copies, TorchCopies
from fluxtrain.measure.probe.rate import best_rate, failed
from fluxtrain.units import MIB, bytes_text

TIMED_BYTES = 128 * MIB
CHECKED_BYTES = 16 * MIB + 13  # no whole number of words, pages or packets
CHECKS = 2  # of a pair, each of other bytes at another place
REPEATS = 5
LIMIT_S = 0.25  # for a pair: eight cards have 56
NO_ACCESS = "no peer access: copies between them go through the host"
WRONG = "peer access gives wrong bytes"


def peer_names(cards: int) -> tuple[str, ...]:
    """Name the rates of all pairs of so many cards."""
    return tuple(peer_name(a, b) for a, b in permutations(range(cards), 2))


def peer_rates(
    cards: int,
    *,
    copies: Copies | None = None,
    checked_bytes: int = CHECKED_BYTES,
    timed_bytes: int = TIMED_BYTES,
) -> dict[str, Rate]:
    """Measure bytes a second from each card to each other one, where checked copies were right."""
    copies = TorchCopies() if copies is None else copies
    found = copies.count()
    if found < cards:
        return dict.fromkeys(
            peer_names(cards), Rate(None, f"not measured: torch has {found} cards")
        )
    sent, rates = _pattern(copies, checked_bytes), dict[str, Rate]()
    size = max(timed_bytes, CHECKS * checked_bytes)
    for source, target in permutations(range(cards), 2):
        try:
            rate = _pair(copies, source, target, sent, size)
        except (RuntimeError, MemoryError) as error:  # of this pair alone
            rate = failed(error)
        rates[peer_name(source, target)] = rate
    return rates


def _pattern(copies: Copies, size_bytes: int) -> Any:
    """Return bytes of which no two ranges are alike."""
    import torch

    sent = copies.on_host(size_bytes)
    generator = torch.Generator().manual_seed(size_bytes)
    sent.random_(0, 256, generator=generator)
    return sent


def _pair(copies: Copies, source: int, target: int, sent: Any, size: int) -> Rate:
    if not copies.can_reach(source, target):
        return Rate(None, NO_ACCESS)
    here, there = copies.on_card(source, size), copies.on_card(target, size)
    wrong = max(_wrong_bytes(copies, source, target, sent, (here, there)))
    if wrong:
        count = sent.numel()
        return Rate(None, f"{WRONG}: {wrong} of {count} were not those that were sent")

    def copy() -> None:
        copies.copy(there, here, source)
        copies.wait(source)
        copies.wait(target)

    rate = best_rate(size, copy, repeats=REPEATS, limit_s=LIMIT_S)
    return Rate(rate, f"{bytes_text(size)}, {CHECKS} copies compared byte for byte")


def _wrong_bytes(
    copies: Copies, source: int, target: int, sent: Any, buffers: tuple[Any, Any]
) -> Iterator[int]:
    """Count, for each of some copies, the bytes that are not those that left the host."""
    size = sent.numel()
    arrived = copies.on_host(size)
    for number in range(CHECKS):
        here, there = (one[number * size : (number + 1) * size] for one in buffers)
        sent ^= 0x5A + number  # what an earlier copy left behind is not taken for this one's
        copies.copy(here, sent, source)
        copies.wait(source)
        copies.copy(there, here, source)
        copies.wait(source)
        copies.wait(target)
        copies.copy(arrived, there, target)
        copies.wait(target)
        yield int((arrived != sent).sum())
