"""Gradients that are at home, or on their way there."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fluxtrain.device.transfer import Transfer
from fluxtrain.memory.segment import Member


@dataclass(eq=False)
class Arrival:
    """A group's gradients at home, or on their way, and their norms on the device."""

    transfers: list[Transfer]
    norms: Tensor | None  # (trained members with a gradient,) fp32 on the device; None: ask at home
    norm_of: dict[int, int]  # member index -> position in norms

    def is_of(self, members: list[Member]) -> bool:
        """Are `norms` those of these members, and of no other?"""
        known = 0 if self.norms is None else self.norms.numel()
        return known == len(members) and self.norm_of.keys() == {m.index for m in members}

    def wait(self) -> None:
        for transfer in self.transfers:
            transfer.wait_host()


def arrival_of(transfers: list[Transfer], norms: list[Tensor], members: list[Member]) -> Arrival:
    """`norms`: of the members in their order, some at a time."""
    together = norms[0] if len(norms) == 1 else torch.cat(norms)
    return Arrival(transfers, together, {m.index: place for place, m in enumerate(members)})
