"""The device that a wrapped model computes on, and the memory that is free for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from fluxtrain.core.memory.mapped import cool, copied_bytes
from fluxtrain.core.ranks.join import ALONE, Ranks, gpus_of_rank
from fluxtrain.errors import BadInput, DoesNotFit
from fluxtrain.machine.machine import available_bytes
from fluxtrain.machine.seen_cards import is_full
from fluxtrain.plan.capacity import CardCapacity, CardsCapacity, DiskHome
from fluxtrain.plan.choose import place
from fluxtrain.plan.facts import Capacity, ModelFacts
from fluxtrain.plan.placement import Placement
from fluxtrain.plan.request import MOST_CARDS, ParallelRequest, RunRequest
from fluxtrain.units import bytes_text


def compute_device(device: str | torch.device | None) -> torch.device:
    """Return the device as asked; None: the GPU where torch can use one, else the CPU.

    Raises BadInput for another kind of device, or a GPU that is not there.
    """
    if device is not None:
        try:
            chosen = torch.device(device)
        except RuntimeError as error:
            raise BadInput(f"device {device!r} is unknown: use 'cuda' or 'cpu'") from error
        if chosen.type not in ("cpu", "cuda"):
            raise BadInput(f"device {chosen} is not supported: use 'cuda' or 'cpu'")
        if chosen.type == "cuda" and not torch.cuda.is_available():
            raise BadInput(
                "device='cuda', but torch sees no GPU: install the CUDA build of torch and the "
                "NVIDIA driver, or use device='cpu'"
            )
        return chosen
    from fluxtrain.machine.gpu import check_accelerator

    check_accelerator(torch.cuda.is_available())
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def compute_devices(
    device: str | torch.device | None, cards: int | Sequence[int] | None, ranks: Ranks = ALONE
) -> list[torch.device]:
    """Return the devices of so many cards, or of these numbers; the CPU may occur several times.
    None: every GPU, of which the plan takes the useful ones; or only the named one; of several
    `ranks` that which torch computes on, or else the rank's own. A count of several ranks is that
    of each, whose GPUs follow one another.

    Raises BadInput as `compute_device`, and for a card that does not exist or is named twice.
    """
    first = compute_device(device)
    _refuse_odd(cards)
    if ranks.world > 1 and cards is None and first == torch.device("cuda"):
        return [
            torch.device("cuda", torch.cuda.current_device() or gpus_of_rank(ranks.local_rank)[0])
        ]
    index: int | None = first.index  # torch types it as never None
    if cards == 1 or (cards is None and (first.type == "cpu" or index is not None)):
        return [first]
    there = torch.cuda.device_count()
    asked = there if cards is None else cards
    if first.type == "cpu":
        return [first] * min(asked if isinstance(asked, int) else len(asked), MOST_CARDS)
    if index is not None:
        raise BadInput(f"device is {first} and cards is {cards!r}: leave the number of one out")
    if isinstance(asked, int) and asked > there:
        raise BadInput(f"cards is {asked}, but torch sees {there}: use at most {there}")
    numbers = range(asked) if isinstance(asked, int) else asked
    if ranks.world > 1 and isinstance(asked, int):
        numbers = gpus_of_rank(ranks.local_rank, asked)
    if max(numbers) >= there:
        raise BadInput(f"cards is {cards!r}, but torch sees {there}: use numbers below {there}")
    return [torch.device("cuda", number) for number in numbers]


def of_first(placement: Placement, ranks: Ranks) -> Placement:
    """Return the placement of rank 0 on this rank's cards. Raises BadInput where ranks have
    different numbers of cards."""
    ranks.refuse_other_count(len(placement.cards))
    return ranks.of_first(placement).on(placement.cards)


def devices_of(
    placement: Placement,
    device: str | torch.device | None,
    cards: int | Sequence[int] | None,
    ranks: Ranks = ALONE,
) -> list[torch.device]:
    """Return the devices for a made placement. Raises BadInput for another number of cards."""
    planned = len(placement.cards)
    devices = compute_devices(device, cards or planned, ranks)
    if placement.several_cards and planned != len(devices):
        raise BadInput(
            f"cards is {cards!r}, and the placement is made for {planned} cards: leave it out, or "
            f"name {planned}"
        )
    return devices


def _refuse_odd(cards: Any) -> None:
    """Raise BadInput for what is neither a number of cards nor a list of them."""
    listed = not isinstance(cards, str) and isinstance(cards, Sequence)
    numbers = list(cards) if listed else [cards]
    whole = all(isinstance(one, int) and not isinstance(one, bool) for one in numbers)
    if cards is None or (whole and min(numbers, default=-1) >= (0 if listed else 1)
                         and len(set(numbers)) == len(numbers)):  # fmt: skip
        return
    raise BadInput(f"cards is {cards!r}: use how many, from 1, or a list with each number once")


def cards_capacity(
    model: nn.Module, devices: Sequence[torch.device], *, judges: bool = False
) -> CardsCapacity:
    """Return the free memory of each of these devices once the model's weights have left their
    places; `judges` marks a card that other programs fill as unusable."""
    capacities = [free_capacity(model, device) for device in devices]
    on_gpus = devices[0].type == "cuda"
    names = [torch.cuda.get_device_name(one) if on_gpus else "" for one in devices]
    numbers = [one.index if on_gpus else number for number, one in enumerate(devices)]
    return CardsCapacity(
        cards=tuple(
            CardCapacity(
                index=index,
                name=name,
                free_bytes=one.device_free_bytes,
                unusable=_filled(one.device_free_bytes, device) if judges else "",
            )
            for index, name, one, device in zip(numbers, names, capacities, devices, strict=True)
        ),
        host_available_bytes=capacities[0].host_available_bytes,
        current=torch.cuda.current_device() if on_gpus else None,
    )


def _filled(free_bytes: int | None, device: torch.device) -> str:
    if free_bytes is None:
        return ""
    total_bytes = torch.cuda.mem_get_info(device)[1]
    if not is_full(free_bytes, total_bytes):
        return ""
    return f"other programs fill it, {bytes_text(free_bytes)} of {bytes_text(total_bytes)} is free"


def free_capacity(model: nn.Module, device: torch.device) -> Capacity:
    """Return the free memory once the model's weights have left their present places."""
    cool(model)
    available = available_bytes()
    if available is not None:
        available += copied_bytes(model)  # pages of files count as available
    if device.type != "cuda":
        return Capacity(device_free_bytes=None, host_available_bytes=available)
    here = torch.empty(0, device=device).device  # with its index
    cached = torch.cuda.memory_reserved(here) - torch.cuda.memory_allocated(here)
    weights = sum(p.nbytes for p in model.parameters() if p.device == here)
    return Capacity(
        device_free_bytes=torch.cuda.mem_get_info(here)[0] + cached + weights,
        host_available_bytes=available,
    )


def placed(
    facts: ModelFacts,
    model: nn.Module,
    devices: Sequence[torch.device],
    asked: RunRequest,
    *,
    all_of_them: bool = True,
    disk: DiskHome | None = None,
    ranks: Ranks = ALONE,
) -> tuple[Placement, list[torch.device]]:
    """Place a model whose rows nobody knows yet; also return the devices that compute, in the order
    of the placement's cards. Blocks that share weights are computed on one; `all_of_them` False
    leaves a device out that the model does not fit with, or that other programs fill. Several
    `ranks` deal blocks to several cards as the first does.

    Raises BadInput and DoesNotFit as `place`.
    """
    shares = any(group.kind == "block" and group.users > 1 for group in facts.groups)
    if len(devices) == 1 or shares:
        first = devices[0]
        return place(facts, free_capacity(model, first), asked, disk=disk), [first]
    capacities = cards_capacity(model, devices, judges=not all_of_them)
    numbers = tuple(card.index for card in capacities.cards)
    parallel = ParallelRequest(cards=numbers if all_of_them else "auto")
    try:
        found = place(facts, capacities, asked, parallel, disk=disk)
    except DoesNotFit:  # perhaps on the current card alone
        found = place(facts, replace(capacities, current=None), asked, parallel, disk=disk)
    found = of_first(found, ranks)
    at = {card.index: device for card, device in zip(capacities.cards, devices, strict=True)}
    return found, [devices[0] if card.index is None else at[card.index] for card in found.cards]
