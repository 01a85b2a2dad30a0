"""The device that a wrapped model computes on, and the memory that is free for it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from fluxtrain.errors import BadInput
from fluxtrain.hardware.gpu import Gpus
from fluxtrain.hardware.machine import read_machine
from fluxtrain.memory.mapped import cool, copied_bytes
from fluxtrain.plan.facts import Capacity


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
    from fluxtrain.hardware.device import check_accelerator

    check_accelerator(torch.cuda.is_available())
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def compute_devices(
    device: str | torch.device | None, cards: int | Sequence[int] | None
) -> list[torch.device]:
    """Return the devices of so many cards, or of those numbers; the CPU may be there several times.

    Raises BadInput as `compute_device`, and for a card that is not there or is named twice.
    """
    first = compute_device(device)
    if cards is None:
        return [first]
    numbers = list(range(cards)) if isinstance(cards, int) else list(cards)
    if not numbers or len(set(numbers)) < len(numbers) or min(numbers) < 0:
        raise BadInput(f"cards is {cards!r}: use how many, from 1, or each card's number once")
    if first.type == "cpu":
        return [first] * len(numbers)
    there = torch.cuda.device_count()
    if max(numbers) >= there:
        raise BadInput(f"cards is {cards!r}, but torch sees {there}: use numbers below {there}")
    return [torch.device("cuda", number) for number in numbers]


def free_capacity(model: nn.Module, device: torch.device) -> Capacity:
    """What is free once the model's weights have left the places where they are now."""
    no_gpus = Gpus(gpus=(), driver=None, reason="not asked")
    cool(model)
    available = read_machine(gpus=no_gpus).memory_available_bytes
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
