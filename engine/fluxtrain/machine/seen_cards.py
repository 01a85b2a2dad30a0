"""Say which card is which: torch counts the visible ones in CUDA's order, the driver counts all.

CUDA puts the fastest card first unless CUDA_DEVICE_ORDER=PCI_BUS_ID, and CUDA_VISIBLE_DEVICES
leaves some out. So cards are matched by their UUIDs, which both know.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from msgspec.structs import replace

from fluxtrain.events.answers.machine import Card, Gpu, Machine
from fluxtrain.units import GIB, bytes_text

FULL_SHARE = 0.1  # of a card's memory: with less free, other programs fill it
LEAST_FREE_BYTES = GIB
BF16_CAPABILITY = (8, 0)


def cards_seen(machine: Machine, cuda: Any = None) -> tuple[Card, ...]:
    """Return the cards that torch can use, where the machine shows several, each judged
    separately.

    Makes no context on any card. Tests pass another module in place of `torch.cuda`.
    """
    if len(machine.gpus) < 2:
        return ()
    if cuda is None:
        try:
            import torch
        except ImportError:
            return ()
        cuda = torch.cuda
    if not cuda.is_available():
        return ()
    return tuple(
        judged(_card(index, cuda.get_device_properties(index), machine.gpus), machine.gpus)
        for index in range(cuda.device_count())
    )


def _card(index: int, facts: Any, gpus: Sequence[Gpu]) -> Card:
    gpu = _same_card(index, facts, gpus)
    capability = (int(facts.major), int(facts.minor))
    return Card(
        index=index,
        gpu=None if gpu is None else gpu.index,
        name=str(facts.name),
        memory_total_bytes=int(facts.total_memory),
        memory_free_bytes=None if gpu is None else gpu.memory_free_bytes,
        compute_capability="{}.{}".format(*capability),
        bf16=capability >= BF16_CAPABILITY,
        numa_node=None if gpu is None else gpu.numa_node,
    )


def _same_card(index: int, facts: Any, gpus: Sequence[Gpu]) -> Gpu | None:
    """Find the driver's card by its UUID, which old versions of torch do not tell: then by its
    place among the visible ones, if no other has its name."""
    uuid = str(getattr(facts, "uuid", ""))
    if uuid:
        names = (uuid, f"GPU-{uuid}", f"MIG-{uuid}")
        known = (g for g in gpus if g.uuid in names or set(g.mig_slices or ()) & set(names))
        return next(known, None)
    if index < len(gpus) and gpus[index].name == str(facts.name):
        return gpus[index]
    return None


def judged(card: Card, gpus: Sequence[Gpu]) -> Card:
    """Return the card with why it cannot be one of several, if it cannot."""
    gpu = next((gpu for gpu in gpus if gpu.index == card.gpu), None)
    return replace(card, unusable=_split(gpu) or _full(card, gpu))


def _split(gpu: Gpu | None) -> str:
    if gpu is None or not gpu.mig:
        return ""
    return (
        "it is split by MIG, and CUDA gives a process one slice alone: name that slice in "
        "CUDA_VISIBLE_DEVICES to train on it, or switch MIG off with "
        f"`sudo nvidia-smi -i {gpu.index} -mig 0`"
    )


def is_full(free_bytes: int, total_bytes: int) -> bool:
    """Tell whether other programs fill a card so far that it cannot help."""
    return free_bytes < max(FULL_SHARE * total_bytes, LEAST_FREE_BYTES)


def _full(card: Card, gpu: Gpu | None) -> str:
    free, total = card.memory_free_bytes, card.memory_total_bytes
    if free is None or total is None or not is_full(free, total):
        return ""
    programs = () if gpu is None else gpu.other_processes or ()
    told = ", ".join(
        f"pid {one.pid}" + ("" if one.used_bytes is None else f" {bytes_text(one.used_bytes)}")
        for one in programs
    )
    by = f" ({told})" if told else ""
    return (
        f"other programs fill it{by}, {bytes_text(free)} of {bytes_text(total)} is free: end them, "
        "or leave it out"
    )


def of_one_generation(cards: Sequence[Card], *, needs_bf16: bool) -> tuple[Card, ...]:
    """Return the cards with those marked that cannot compute in bf16, where that is trained in."""
    return tuple(
        replace(
            card,
            unusable=f"it has no bf16 (compute capability {card.compute_capability}, 8.0 is "
            "needed): leave it out, or train in model.dtype=float16 on all cards",
        )
        if needs_bf16 and card.bf16 is False and not card.unusable
        else card
        for card in cards
    )
