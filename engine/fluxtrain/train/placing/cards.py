"""The cards of this machine, as the planner for several of them asks for them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import cache

import msgspec
import torch
from torch import distributed

from fluxtrain.config.schema import RunConfig
from fluxtrain.errors import DoesNotFit
from fluxtrain.events.answers.machine import TOGETHER, Card, Machine
from fluxtrain.events.run_folder.run_dir import runs_root
from fluxtrain.machine.before_torch import limit_within, segments_grow
from fluxtrain.machine.seen_cards import BF16_CAPABILITY, cards_seen, of_one_generation
from fluxtrain.measure.probe.bandwidth import matmul_rate
from fluxtrain.measure.probe.cards import peer_rate
from fluxtrain.measure.probe.probe import known_rates
from fluxtrain.measure.small_model import free_memory
from fluxtrain.plan.capacity import CardCapacity, CardsCapacity
from fluxtrain.plan.rates import (
    BF16_UPDATE_BYTES,
    CardsRates,
    Rates,
    cards_rates_from,
)
from fluxtrain.units import GIB, bytes_text

_SMALLEST_BYTES = 64 << 20


def hold_to_budget(budget_gib: float | None, others: Iterable[int] = ()) -> int | None:
    """Cap torch's allocator; returns the bytes it surely gives out (None: no budget was set), on
    the current GPU and on each of the `others`.

    What CUDA itself takes for this process (context, kernels: some hundred MiB) counts against the
    budget, because that is what `nvidia-smi` shows and what a card of that size would lose. So do
    NCCL's buffers, and the page by which a segment that grows may pass its limit.
    Raises DoesNotFit when nothing is left.
    """
    if budget_gib is None:
        return None
    here = torch.cuda.current_device()
    torch.zeros(1, device=torch.device("cuda", here))
    free_bytes, total_bytes = torch.cuda.mem_get_info(here)
    context_bytes = _context_bytes(total_bytes - free_bytes, here) + nccl_bytes()
    budget_bytes = min(int(budget_gib * GIB), total_bytes)
    left_bytes = budget_bytes - context_bytes
    if left_bytes < _SMALLEST_BYTES:
        raise DoesNotFit(
            f"placement.budget_gib={budget_gib:g} leaves nothing after the "
            f"{bytes_text(context_bytes)} that CUDA itself takes: set at least "
            f"{(context_bytes + GIB) / GIB:.1f}"
        )
    limit_bytes = limit_within(left_bytes, grow=segments_grow())
    torch.cuda.set_per_process_memory_fraction(limit_bytes / total_bytes, here)
    for card in others:
        total = torch.cuda.get_device_properties(card).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, limit_bytes / total), card)
    return limit_bytes


def _context_bytes(used_bytes: int, card: int) -> int:
    """Return this process's memory on a card outside torch: by NVML, or all used memory where NVML
    is silent."""
    from fluxtrain.machine.gpu import own_process_bytes

    own_bytes = own_process_bytes()
    return (used_bytes if own_bytes is None else own_bytes) - torch.cuda.memory_reserved(card)


def nccl_bytes() -> int:
    """Return what NCCL will take of this process's card, where it is one of several."""
    joins = distributed.is_available() and distributed.is_initialized()
    joins = joins and distributed.get_world_size() > 1
    return _NCCL_BYTES if joins and "nccl" in str(distributed.get_backend_config()) else 0


_NCCL_BYTES = int(1.2 * GIB)  # of two communicators, for gradients and weights, on two H200
_ALIKE = 0.05  # cards of one kind differ by less, from moment to moment


def first_of(config: RunConfig) -> int:
    """Return torch's number of the card where a run measures before it is planned: the first of a
    list, where embedding and head will be; else torch's first."""
    asked = config.parallel.cards
    return asked[0] if isinstance(asked, tuple) else 0


def make_first_current(config: RunConfig, device: str) -> None:
    """Make the first card of a list torch's current one: measurements before the plan and free
    memory then concern it."""
    if device != "cuda" or not isinstance(config.parallel.cards, tuple):
        return
    if (index := first_of(config)) < torch.cuda.device_count():  # else the plan refuses it in words
        torch.cuda.set_device(index)


def cards_of(
    config: RunConfig, machine: Machine, device: str, limit_bytes: int | None
) -> CardsCapacity:
    """Return the cards that torch sees, with the bytes that may be used of each: at most
    `limit_bytes`, which a budget leaves after CUDA's own share and which torch's allocator is
    limited to.

    Without a GPU these are as many parts of the processor as `parallel.cards` asks for.
    """
    available = machine.memory_available_bytes
    if device != "cuda":
        asked = config.parallel.cards
        numbers = range(asked) if isinstance(asked, int) else asked
        indices = (0,) if numbers == "auto" else tuple(numbers)
        cards = tuple(CardCapacity(index=index) for index in indices)
        return CardsCapacity(cards=cards, host_available_bytes=available)
    here = torch.cuda.current_device()
    needs_bf16 = config.model.dtype in ("auto", "bfloat16")
    needs_bf16 &= torch.cuda.get_device_capability(here) >= BF16_CAPABILITY
    seen = _named(of_one_generation(cards_seen(machine), needs_bf16=needs_bf16), config)
    if len(seen) < 2:
        return CardsCapacity(
            cards=(_capacity(here, "", limit_bytes),), host_available_bytes=available
        )
    found = tuple(
        replace(_capacity(card.index, card.unusable or "", limit_bytes), gpu=card.gpu)
        for card in seen
    )
    return CardsCapacity(cards=found, host_available_bytes=available)


def _named(seen: tuple[Card, ...], config: RunConfig) -> tuple[Card, ...]:
    """Return the cards, with those unusable that a list of cards does not name: others may need
    them, and a context takes some hundred MiB."""
    asked = config.parallel.cards
    if not isinstance(asked, tuple):
        return seen
    why = "as set with parallel.cards"
    return tuple(
        card if card.index in asked else msgspec.structs.replace(card, unusable=why)
        for card in seen
    )


def _capacity(index: int, unusable: str, limit_bytes: int | None) -> CardCapacity:
    """Return the free memory of a card; an unusable one is not touched, which would take some
    hundred MiB of it."""
    properties = torch.cuda.get_device_properties(index)
    if unusable:
        return CardCapacity(index=index, name=properties.name, free_bytes=0, unusable=unusable)
    free_bytes, total_bytes = torch.cuda.mem_get_info(index)
    if limit_bytes is not None:
        free_bytes = min(free_bytes, limit_bytes)
        share = min(1.0, limit_bytes / total_bytes)
        torch.cuda.set_per_process_memory_fraction(share, index)
    return CardCapacity(index=index, name=properties.name, free_bytes=free_bytes)


def rates_of_cards(
    cards: CardsCapacity,
    first: Rates,
    elsewhere: Mapping[str, float | None] | None = None,
    *,
    timed_on: int = 0,
) -> CardsRates:
    """Return the rates of all cards, from those of the first one, with a block that was timed on
    card `timed_on`, as were all of `first` where no probe has measured any. A probe of this machine
    has measured each and all at once; without one, each computes a product now, and copies between
    two are measured where they arrive as they left. Of another machine `elsewhere` are the
    rates."""
    indices = [card.index for card in cards.cards]
    usable = [card.index for card in cards.cards if not card.unusable]
    if elsewhere is not None:
        return cards_rates_from(first, elsewhere, indices)
    if not cards.has_gpu or len(indices) == 1:
        return CardsRates(cards=(first,) * len(indices))
    probed = {name: rate.per_s for name, rate in known_rates(runs_root()).items()}
    if probed.get(TOGETHER[0]):
        return cards_rates_from(first, probed, indices, timed_on=timed_on)
    seconds = {index: _product_s(index) for index in usable}
    first_s = seconds.get(timed_on, seconds[usable[0]]) if usable else 1.0
    times = [seconds.get(index, first_s) / first_s for index in indices]
    peers = {
        (a, b): rate
        for a, source in enumerate(indices)
        for b, target in enumerate(indices)
        if a != b
        and {source, target} <= set(usable)
        and (rate := _peer_bytes_per_s(source, target)) is not None
    }
    for index in usable:  # what was multiplied and copied is no memory of the run
        free_memory(torch.device("cuda", index))
    return CardsRates(
        cards=tuple(_as_long(first, factor) for factor in times),
        peers=peers,
        host_bytes_per_s=BF16_UPDATE_BYTES * first.adamw_per_s,
    )


def _as_long(rates: Rates, factor: float) -> Rates:
    """Return the rates of a card that computes `factor` times as long."""
    return rates if abs(factor - 1) < _ALIKE else rates.slower(factor)


@cache
def _product_s(index: int) -> float:
    with torch.cuda.device(index):
        rate = matmul_rate(f"cuda:{index}").per_s
    assert rate is not None
    return 1 / rate


@cache
def _peer_bytes_per_s(source: int, target: int) -> float | None:
    return peer_rate(source, target).per_s
