import math

import torch
from torch import Tensor, nn


class LoRALinear(nn.Module):
    def __init__(self, base: nn.Linear, rank: int, alpha: float) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.A = nn.Parameter(torch.empty(rank, base.in_features))
        nn.init.kaiming_uniform_(self.A, a=math.sqrt(5))
        self.B = nn.Parameter(torch.zeros(base.out_features, rank))
        self.scale = alpha / rank

    def forward(self, hidden: Tensor) -> Tensor:
        return self.base(hidden) + self.scale * (hidden @ self.A.T @ self.B.T)

    def merged(self) -> Tensor:
        return self.base.weight + self.scale * self.B @ self.A
