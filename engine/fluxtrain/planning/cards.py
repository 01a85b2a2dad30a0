"""The cards of this machine, as the planner for several of them asks for them."""

from __future__ import annotations

import statistics
import time
from dataclasses import replace
from functools import cache

import torch

from fluxtrain.client.machine import Machine
from fluxtrain.config.schema import RunConfig
from fluxtrain.device.among.streams import reaches
from fluxtrain.hardware.allocator import limit_within, segments_grow
from fluxtrain.plan.cards.capacity import CardCapacity, CardsCapacity
from fluxtrain.plan.cards.rates import CardsRates, times_as_long
from fluxtrain.plan.cost.rates import Rates
from fluxtrain.units import GIB
from fluxtrain.wrapping.target import in_process_group

_TIMED_BYTES = 64 << 20  # of a copy between two cards
_TIMES = 5
_SIZE = 4096  # of the product that tells how fast a card computes
_ALIKE = 0.05  # cards of one kind differ by less, from moment to moment
_BF16 = (8, 0)  # the least compute capability with it


def cards_of(config: RunConfig, machine: Machine, device: str) -> CardsCapacity:
    """Return the cards that torch sees, with what of each may be used. Without a GPU these are as
    many parts of the processor as `parallel.cards` asks for."""
    available = machine.memory_available_bytes
    if device != "cuda":
        asked = config.parallel.cards
        numbers = range(asked) if isinstance(asked, int) else asked
        indices = (0,) if numbers == "auto" else tuple(numbers)
        cards = tuple(CardCapacity(index=index) for index in indices)
        return CardsCapacity(cards=cards, host_available_bytes=available)
    needs_bf16 = torch.cuda.get_device_capability(0) >= _BF16
    found = tuple(
        _card(index, config.placement.budget_gib, needs_bf16=needs_bf16) for index in _seen()
    )
    return CardsCapacity(cards=found, host_available_bytes=available)


def _seen() -> range | tuple[int, ...]:
    """Return the numbers of the cards that this process may use: of a group's, one each."""
    return (
        (torch.cuda.current_device(),) if in_process_group() else range(torch.cuda.device_count())
    )


def _card(index: int, budget_gib: float | None, *, needs_bf16: bool) -> CardCapacity:
    free_bytes, total_bytes = torch.cuda.mem_get_info(index)
    unusable = ""
    if needs_bf16 and torch.cuda.get_device_capability(index) < _BF16:
        unusable = "it does not compute in bf16, as card 0 does: set model.dtype=float16"
    if budget_gib is not None:
        # CUDA's own share of this process, which is not there before its first use of the card
        torch.zeros(1, device=torch.device("cuda", index))
        now_bytes = torch.cuda.mem_get_info(index)[0]
        context_bytes = max(0, free_bytes - now_bytes)
        left_bytes = max(0, min(int(budget_gib * GIB), total_bytes) - context_bytes)
        limit_bytes = limit_within(left_bytes, grow=segments_grow())
        torch.cuda.set_per_process_memory_fraction(limit_bytes / total_bytes, index)
        free_bytes = min(now_bytes, limit_bytes)
    name = torch.cuda.get_device_name(index)
    return CardCapacity(index=index, name=name, free_bytes=free_bytes, unusable=unusable)


def rates_of_cards(cards: CardsCapacity, first: Rates) -> CardsRates:
    """Return the rates of all cards, from those of the card that was measured and a product that
    each of them computes; copies between two cards are measured where they arrive as they left."""
    indices = [card.index for card in cards.cards]
    if not cards.has_gpu or len(indices) == 1:
        return CardsRates(cards=(first,) * len(indices))
    seconds = [_product_s(index) for index in indices]
    times = [one / seconds[0] for one in seconds]
    peers = {
        (a, b): rate
        for a, source in enumerate(indices)
        for b, target in enumerate(indices)
        if a != b and (rate := _peer_bytes_per_s(source, target)) is not None
    }
    return CardsRates(cards=tuple(_as_long(first, factor) for factor in times), peers=peers)


def _as_long(rates: Rates, factor: float) -> Rates:
    """Return the rates of a card that computes `factor` times as long."""
    if abs(factor - 1) < _ALIKE:
        return rates
    timed = rates.calibration
    return replace(
        rates,
        matmul_per_s=rates.matmul_per_s / factor,
        calibration=None if timed is None else times_as_long(timed, factor),
    )


@cache
def _product_s(index: int) -> float:
    device = torch.device("cuda", index)
    left = torch.randn(_SIZE, _SIZE, device=device).half()
    took: list[float] = []
    for _ in range(_TIMES + 2):
        torch.cuda.synchronize(device)
        started_s = time.perf_counter()
        for _ in range(8):
            left @ left
        torch.cuda.synchronize(device)
        took.append(time.perf_counter() - started_s)
    return statistics.median(took[2:])


@cache
def _peer_bytes_per_s(source: int, target: int) -> float | None:
    devices = torch.device("cuda", source), torch.device("cuda", target)
    if not reaches(*devices):
        return None
    there, here = (torch.empty(_TIMED_BYTES, dtype=torch.uint8, device=one) for one in devices)
    took: list[float] = []
    for _ in range(_TIMES + 1):
        for one in devices:
            torch.cuda.synchronize(one)
        started_s = time.perf_counter()
        here.copy_(there, non_blocking=True)
        for one in devices:
            torch.cuda.synchronize(one)
        took.append(time.perf_counter() - started_s)
    return _TIMED_BYTES / statistics.median(took[1:])
