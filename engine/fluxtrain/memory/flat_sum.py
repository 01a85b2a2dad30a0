"""The sum of one group's gradients in one backward pass, flat and in fp32."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fluxtrain.memory.group import Group


@dataclass(eq=False)
class FlatSum:
    """The sum, and who has added to it."""

    flat: Tensor  # (trained_elements,) fp32 on the device
    parts: dict[int, Tensor]  # of it, by member index, in the members' shapes
    touched: set[int]  # member indices

    def clear_untouched(self, group: Group) -> None:
        """Padding and members without a gradient are zero, so that whole ranges can be updated."""
        end = base = 0
        for segment in group.trained:
            for member in segment.by_offset:
                if member.index in self.touched:
                    if end < base + member.offset:
                        self.flat[end : base + member.offset].zero_()
                    end = base + member.offset + member.count
            base += segment.elements
        if end < base:
            self.flat[end:base].zero_()


def could_be(group: Group, gradient: Tensor) -> bool:
    """Could this tensor be the group's flat sum?"""
    flat = gradient.dtype == torch.float32 and gradient.is_contiguous()
    return flat and gradient.numel() == group.trained_elements
