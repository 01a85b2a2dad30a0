"""Figures for a screen: bytes held, and where each block is."""

from __future__ import annotations

import re
from collections.abc import Iterable

import torch
from msgspec.structs import replace

from fluxtrain.core.device import page_locks
from fluxtrain.core.memory.group import Group
from fluxtrain.core.memory.rows import RowBuffers
from fluxtrain.core.runtime.card import EngineCard
from fluxtrain.core.runtime.context import Context
from fluxtrain.core.runtime.counters import frozen_bytes_of, held_by_torch, packed_bytes_of
from fluxtrain.events.events import BlockRun, CardMemory, MemorySampled, ResidencySampled
from fluxtrain.plan.group_placement import Tier

_LAST_NUMBER = re.compile(r"(\d+)(?!.*\d)")


def residency(context: Context) -> ResidencySampled:
    """Say where the weights, gradients and states of each block are, in the model's order."""
    blocks = [g for g in context.groups if g.kind == "block"]
    return ResidencySampled(
        weights="".join(_weights_letter(context, g) for g in blocks),
        gradients="".join(_gradient_letter(context, g) for g in blocks),
        optimizer="".join(_state_letter(g) for g in blocks),
        weights_bytes=sum(g.weight_bytes for g in context.groups),
        gradients_bytes=sum(g.gradient_bytes for g in context.groups),
        optimizer_bytes=sum(g.state_bytes for g in context.groups),
        blocks=_runs(blocks),
        frozen_bytes=sum(frozen_bytes_of(g) for g in context.groups),
        packed_bytes=sum(packed_bytes_of(g) for g in context.groups),
        cards="".join(_digit(g.placement.card) for g in blocks) if len(context.cards) > 1 else "",
    )


def _digit(card: int) -> str:
    return "0123456789abcdefghijklmnopqrstuvwxyz"[min(card, 35)]


def memory_use(context: Context) -> MemorySampled:
    """Add up the bytes held now, by purpose, on all cards and on each.

    Without a GPU the device is the slots, buffers and block inputs that one would hold. Page-locked
    bytes are those of the process, as its limits are: groups, rows, offloaded activations, staging,
    and torch's own. What the process holds on the host is not looked at.
    """
    cards = tuple(_card_memory(context, card) for card in context.cards)
    by = {name: sum(card.by[name] for card in cards) for name in cards[0].by}
    totals = [card.total_bytes for card in cards if card.total_bytes is not None]
    budgets = [card.budget_bytes for card in cards if card.budget_bytes is not None]
    rows_bytes = sum(rows.host_bytes for rows in _row_buffers(context))
    return MemorySampled(
        device_total_bytes=sum(totals) if totals else None,
        device_used_bytes=sum(card.used_bytes for card in cards),
        device_peak_bytes=sum(card.peak_bytes for card in cards),
        device_budget_bytes=sum(budgets) if budgets else None,
        device_by=by,
        host_rss_bytes=None,
        host_peak_bytes=None,
        host_arena_bytes=sum(_bytes_in("host", context.groups)) + rows_bytes,
        host_pinned_bytes=page_locks.LOCKS.held_bytes,
        host_limit_bytes=None,
        cards=cards if len(cards) > 1 else (),
        disk_bytes=sum(_bytes_in("disk", context.groups)),
    )


def _card_memory(context: Context, card: EngineCard) -> CardMemory:
    mine = [group for group in context.groups if group.placement.card == card.number]
    weights, gradients, states = _bytes_in("device", mine)
    unpacked = card.window.scratch.size_bytes
    frozen, packed = _untrained_on_device(card, mine)
    by = {
        "weights": _copied_bytes(context, card) + weights - unpacked - frozen - packed,
        "frozen": frozen,
        "packed": packed,
        "unpacked": unpacked,
        "gradients": card.gradients.device_bytes + gradients,
        "optimizer": states,
        "activations": max(0, card.counts.block_input_bytes),
        "workspace": 0,
        "cache": 0,
    }
    device = card.torch_device
    total: int | None = None
    if device.type == "cuda":
        allocated, reserved = (held["current"] for held in held_by_torch(device))
        by["workspace"] = max(0, allocated - sum(by.values()))
        by["cache"] = max(0, reserved - allocated)
        total = torch.cuda.get_device_properties(device).total_memory
        card.counts.peak_bytes = card.counts.device_peaks()[1]
    used = sum(by.values())
    card.counts.peak_bytes = max(card.counts.peak_bytes, used)
    return CardMemory(
        number=card.number,
        total_bytes=total,
        used_bytes=used,
        peak_bytes=card.counts.peak_bytes,
        budget_bytes=context.plan.budget_of(card.number),
        by=by,
    )


def sample_peak(context: Context) -> None:
    """Update the peak of held bytes (on CUDA the allocator keeps it)."""
    if context.device.torch_device.type == "cuda":
        return
    for card in context.cards:
        mine = [group for group in context.groups if group.placement.card == card.number]
        at_device = sum(_bytes_in("device", mine))
        held = _copied_bytes(context, card) + card.gradients.device_bytes + at_device
        counts = card.counts
        counts.peak_bytes = max(counts.peak_bytes, held + counts.block_input_bytes)


def _untrained_on_device(card: EngineCard, mine: Iterable[Group]) -> tuple[int, int]:
    """Add up frozen and packed weights of groups on the card and of groups in its slots."""
    there = [group for group in mine if group.is_on("device")]
    slots = list(card.window.slots)  # a copy: another thread may add one
    there += [slot.group for slot in slots if slot.group is not None]
    return sum(map(frozen_bytes_of, there)), sum(map(packed_bytes_of, there))


def _row_buffers(context: Context) -> list[RowBuffers]:
    every = [group.rows for group in context.groups]  # as in `_copied_bytes`
    return [rows for rows in every if rows is not None]


def _copied_bytes(context: Context, card: EngineCard) -> int:
    """Count the bytes on the card of copies of host weights."""
    found = card.window.size_bytes
    if card.number:  # rows and vocabulary chunks are of what stands outside of blocks
        return found
    rows = sum(rows.device_bytes for rows in _row_buffers(context))
    heads = [
        u.vocab_chunks for u in context.units
    ]  # a copy of the list: another thread may drop one
    return found + rows + sum(head.device_bytes for head in heads if head is not None)


def _weights_letter(context: Context, group: Group) -> str:
    if group.is_on("device"):
        return "G"
    slot = context.cards[group.placement.card].window.holds(group)
    if slot is None or slot.transfer is None:
        return "N" if group.is_on("disk") else "C"
    return "G" if slot.transfer.done() else ">"


def _gradient_letter(context: Context, group: Group) -> str:
    if context.gradients_of(group).is_open(group):
        return "G"
    if not group.has_gradient:
        return "."
    arrival = context.gradients_of(group).host.arrivals.get(group)
    if group.is_on("device", "gradients"):
        return "G"
    under_way = arrival is not None and not all(t.done() for t in arrival.transfers)
    at_rest = "N" if group.is_on("disk", "gradients") else "C"
    return "<" if under_way else at_rest


def _state_letter(group: Group) -> str:
    if not group.has_state:
        return "."
    if group.is_on("disk", "state"):
        return "N"
    return "G" if group.is_on("device", "state") else "C"


def _bytes_in(tier: Tier, groups: Iterable[Group]) -> tuple[int, int, int]:
    """Count the bytes of weights, gradients and optimizer states that live in a tier."""
    there = list(groups)
    return (
        sum(group.memory.weight_bytes.get(tier, 0) for group in there),
        sum(group.gradient_bytes for group in there if group.is_on(tier, "gradients")),
        sum(group.state_bytes for group in there if group.is_on(tier, "state")),
    )


def _runs(groups: Iterable[Group]) -> tuple[BlockRun, ...]:
    """Merge neighbours such as `model.layers.0`, `model.layers.1`, ... of equal sizes into runs."""
    runs: list[BlockRun] = []
    for group in groups:
        name = group.name
        found = _LAST_NUMBER.search(name)
        one = BlockRun(
            name=name if found is None else f"{name[: found.start()]}{{}}{name[found.end() :]}",
            first=int(found[1]) if found else 0,
            count=1,
            weights_bytes=group.weight_bytes,
            gradients_bytes=group.gradient_bytes,
            optimizer_bytes=group.state_bytes,
            frozen_bytes=frozen_bytes_of(group),
            packed_bytes=packed_bytes_of(group),
        )
        last = runs[-1] if runs else None
        if last is not None and one == replace(last, first=last.first + last.count, count=1):
            runs[-1] = replace(last, count=last.count + 1)
        else:
            runs.append(one)
    return tuple(runs)
