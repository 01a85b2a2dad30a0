"""The global gradient norm, computed on the device and read without stopping it."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fluxtrain.memory.device import Device, Ticket
from fluxtrain.optim.clip import clip_scale


class GradNorm:
    """2-norm over all gradients of a step (before clipping), on its way to the host."""

    def __init__(self, device: Device, parts: list[Tensor], max_norm: float | None) -> None:
        self.max_norm = max_norm
        total = (
            torch.linalg.vector_norm(torch.cat([p.reshape(-1) for p in parts]), dtype=torch.float32)
            if parts
            else torch.zeros((), device=device.torch_device)
        )
        self.on_device = total  # scalar, fp32
        self._on_device_scale: Tensor | None = None
        self._host = torch.empty(1, pin_memory=device.pins)
        self._ticket: Ticket = device.download(self._host, total.reshape(1))

    def value(self) -> float:
        """The norm; waits until the backward pass has finished."""
        self._ticket.wait_host()
        return float(self._host[0])

    def scale(self) -> float:
        """What gradients are multiplied by: 1 without clipping; NaN when the norm is not finite."""
        norm = self.value()
        if self.max_norm is not None and not math.isfinite(norm):
            return math.nan
        return clip_scale(norm, self.max_norm)

    def device_scale(self) -> Tensor:
        """`scale()` as an fp32 scalar on the device, computed there with the same roundings."""
        if self._on_device_scale is None:
            norm = self.on_device
            if self.max_norm is None:
                self._on_device_scale = torch.ones_like(norm)
            else:
                limit = torch.full_like(norm, self.max_norm)
                ratio = torch.clamp(limit / (norm + 1e-6), max=1.0)
                self._on_device_scale = torch.where(torch.isfinite(norm), ratio, torch.nan)
        return self._on_device_scale
