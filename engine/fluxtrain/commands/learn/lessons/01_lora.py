"""Task 1: LoRA by hand."""

import torch
from torch import Tensor, nn


class LoRALinear(nn.Module):
    """A linear layer that is frozen, and an adapter of low rank beside it."""

    def __init__(self, base: nn.Linear, rank: int, alpha: float) -> None:
        super().__init__()
        self.base = base
        self.A = nn.Parameter(torch.empty(rank, base.in_features))
        self.B = nn.Parameter(torch.empty(base.out_features, rank))
        raise NotImplementedError("initialise A and B, and freeze the base")

    def forward(self, hidden: Tensor) -> Tensor:  # (..., in) -> (..., out)
        raise NotImplementedError

    def merged(self) -> Tensor:
        """Return the weight (out, in) of a plain layer that does the same."""
        raise NotImplementedError
