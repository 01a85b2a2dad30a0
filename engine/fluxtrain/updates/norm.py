"""The global gradient norm, computed on the device and read without stopping it."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from fluxtrain.device.device import Device
from fluxtrain.device.page_locks import host_empty
from fluxtrain.device.transfer import Transfer
from fluxtrain.updates.clip import clip_scale, clip_scale_on_device


class GradNorm:
    """2-norm over all gradients of a step (before clipping), on its way to the host.

    `losses` (scalars) travel with it. With a limit or losses it guards the update: where norm or
    losses are not finite, the scale is NaN, and nothing is updated. `loss_scale` (0-d fp32 on the
    device): what the losses were multiplied by before the backward pass; norm and scale take it
    out again, so that no gradient is passed over for it.
    """

    def __init__(
        self,
        device: Device,
        parts: list[Tensor],
        max_norm: float | None,
        losses: Sequence[Tensor] = (),
        loss_scale: Tensor | None = None,
    ) -> None:
        self.max_norm = max_norm
        self.scaled = loss_scale is not None
        self.guards = max_norm is not None or bool(losses) or self.scaled
        self._losses = slice(1, 1 + len(losses))
        total = (
            torch.linalg.vector_norm(torch.cat([p.reshape(-1) for p in parts]), dtype=torch.float32)
            if parts
            else torch.zeros((), device=device.torch_device)
        )
        told = torch.stack([total, *(loss.detach().float() for loss in losses)])
        if loss_scale is not None:
            told = torch.cat([told[:1] / loss_scale, told[1:], loss_scale.reshape(1)])
        self._on_device = told  # norm, losses, loss scale; fp32
        self._on_device_scale: Tensor | None = None
        self._read_scale: float | None = None  # once the numbers were here; each group's job asks
        self._host = host_empty(told.shape, torch.float32, pin=device.pins)
        self._transfer: Transfer = device.download(self._host, told)

    def value(self) -> float:
        """The norm; waits until the backward pass has finished."""
        self._transfer.wait_host()
        return float(self._host[0])

    def losses(self) -> list[float]:
        """The losses, in nats a token; waits as `value` does."""
        self._transfer.wait_host()
        return [float(loss) for loss in self._host[self._losses]]

    def loss_scale(self) -> float | None:
        """What the losses were multiplied by, None without a loss scale; waits as `value` does."""
        self._transfer.wait_host()
        return float(self._host[-1]) if self.scaled else None

    def overflowed(self) -> bool:
        """Were gradients too large for fp16 at this loss scale, and nothing else wrong? Waits as
        `value` does."""
        return self.scaled and not math.isfinite(self.value()) and self.losses_are_finite()

    def losses_are_finite(self) -> bool:
        """Waits as `value` does."""
        return all(math.isfinite(loss) for loss in self.losses())

    def is_known(self) -> bool:
        """Would `value` not wait?"""
        return self._transfer.done()

    def refuses(self) -> bool:
        """Is the step not made, and not for an overflow that a smaller loss scale cures? Waits as
        `value` does."""
        return math.isnan(self.scale()) and not self.overflowed()

    def all_finite(self) -> Tensor:
        """Will the step be made? A truth value on the device."""
        return torch.isfinite(self._on_device).all()

    def scale(self) -> float:
        """What gradients are multiplied by: 1 without clipping (the loss scale's inverse with one),
        NaN where nothing may happen."""
        if self._read_scale is None:
            norm = self.value()
            if self.guards and not bool(torch.isfinite(self._host).all()):
                self._read_scale = math.nan
            else:
                self._read_scale = clip_scale(norm, self.max_norm) / (self.loss_scale() or 1.0)
        return self._read_scale

    def device_scale(self) -> Tensor:
        """`scale()` as an fp32 scalar on the device, computed there with the same roundings."""
        if self._on_device_scale is None:
            norm = self._on_device[0]
            ratio = torch.ones_like(norm)
            if self.max_norm is not None:
                ratio = clip_scale_on_device(norm, self.max_norm)
            if self.scaled:
                ratio = ratio / self._on_device[-1]
            if self.guards:
                ratio = torch.where(self.all_finite(), ratio, torch.nan)
            self._on_device_scale = ratio
        return self._on_device_scale
