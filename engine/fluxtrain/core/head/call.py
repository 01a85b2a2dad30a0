"""`HeadCall`: what the backward pass of one fused head and loss needs."""

from __future__ import annotations

import torch
from torch import Tensor

from fluxtrain.core.head.steps import Steps
from fluxtrain.core.memory.unit import Unit
from fluxtrain.core.runtime.context import Context
from fluxtrain.core.runtime.passes import UnitCall

# fp16 slopes are kept this many times as large: a probability of 1e-6 has all its bits then, and
# their products with weights below 100 do not overflow.
_HALF_SLOPES = 256.0
NO_TARGETS = torch.empty(0)  # of a call whose loss is computed elsewhere


class HeadCall(UnitCall):
    """One fused head and loss. With a whole head the forward pass computes the gradients, with
    vocabulary chunks the backward pass."""

    def __init__(
        self,
        context: Context,
        unit: Unit,
        target: Tensor,
        ignore_index: int,
        reduction: str,
        dtype: torch.dtype,
        steps: Steps = (),
    ) -> None:
        super().__init__(context, unit)
        self.target = target  # (N,)
        self.ignore_index = ignore_index
        self.mean = reduction == "mean"
        self.dtype = dtype  # of the logits as the caller asked for them
        self.steps = steps  # what is done with the logits before the loss
        self.differentiate = torch.is_grad_enabled()
        self.sums: dict[int, Tensor] = {}  # fp32 gradients, by the id of a trained parameter
        self.hidden_gradient: Tensor | None = None  # (N, H)
        # in fp16: a factor still to be applied to the gradients
        self.kept_scale: Tensor | None = None
        self.spent = False  # the gradients were used

    def trained(self) -> tuple[bool, bool]:
        """Return whether the head's weight and its bias require gradients."""
        trained = {id(m.parameter) for _, m in self.unit.members if m.parameter.requires_grad}
        linear = self.unit.module
        return self.differentiate and id(linear.weight) in trained, (
            self.differentiate and id(linear.bias) in trained
        )

    def add(self, gradients: dict[int, Tensor]) -> None:
        """Give the engine gradients, by the id of their parameter."""
        for group, member in self.unit.members:
            found = gradients.pop(id(member.parameter), None)
            if found is not None:
                self.context.gradients_of(group).add(group, member, found)

    def targets(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return the targets (N,) with -1 where a token does not count, how many count (1 where the
        losses are only added up), and whether one is outside the vocabulary (both 0-d)."""
        assert self.unit.linear is not None
        vocabulary = self.unit.linear.out_features
        kept = self.target != self.ignore_index
        wrong = outside(self.target, self.ignore_index, vocabulary)
        count = kept.sum() if self.mean else torch.ones((), device=self.target.device)
        return torch.where(kept & ~wrong, self.target, -1), count, wrong.any()

    def slope_scale(self, count: Tensor, weights: torch.dtype) -> Tensor:
        """Return the factor of slopes when they are computed (0-d fp32); in fp16 `kept_scale` is
        set to a factor that is still to be applied to their sums."""
        scale = (1.0 / count.clamp(min=1)).float()  # no token: no gradient, as in torch
        if weights == torch.float16:
            self.kept_scale = scale / _HALF_SLOPES
            return torch.full_like(scale, _HALF_SLOPES)
        return scale


def outside(target: Tensor, ignore_index: int, vocabulary: int) -> Tensor:
    """Return which of the targets (N,) count and are outside the vocabulary."""
    return ((target < 0) | (target >= vocabulary)) & (target != ignore_index)
