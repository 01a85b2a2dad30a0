"""Refuse values of a training state that no step of training leaves behind.

The hashes of a checkpoint tell what was altered after it was written. A process that writes wrong
values, or somebody who alters them and seals them again, is told by the values alone.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from fluxtrain.errors import BadInput

SQUARES = ("v", "v_bf16", "v_scales", "m_scales", "exp_avg_sq", "max_exp_avg_sq")


class Impossible(BadInput):
    """A value that no step of training leaves behind."""


def refuse_impossible(name: str, values: Tensor, *, not_negative: bool = False) -> None:
    """Raise Impossible for values that are not finite, or negative where they cannot be.

    One pass over the values, without a copy of them.
    """
    if not values.is_floating_point() or values.numel() == 0:
        return
    least, most = (float(value) for value in torch.aminmax(values))
    if not (math.isfinite(least) and math.isfinite(most)):
        raise Impossible(f"the checkpoint's {name} holds values that are not finite")
    if not_negative and least < 0:
        raise Impossible(
            f"the checkpoint's {name} holds {least:.3g}, and a mean of squares is never negative"
        )


def refuse_impossible_optimizer(state: Mapping[str, Any]) -> None:
    """Raise Impossible for the state dict of an optimizer with impossible values, its rates too."""
    for number, group in enumerate(state.get("param_groups", ())):
        rate = float(group.get("lr", 0.0))
        if not (math.isfinite(rate) and rate >= 0):
            raise Impossible(f"the checkpoint's learning rate of group {number} is {rate:g}")
    entries = state.get("state", {}).items()
    for number, entry in ((n, e) for n, e in entries if isinstance(e, Mapping)):
        for key, value in entry.items():
            name = f"optimizer state {key!r} of parameter {number}"
            if isinstance(value, Tensor):
                refuse_impossible(name, value, not_negative=key in SQUARES)
