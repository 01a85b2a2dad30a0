"""The global gradient norm, computed on the device and read without stopping the device."""

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

    `losses` (scalars) are downloaded with it. With a limit or losses it guards the update: if the
    norm or a loss is not finite, the scale is NaN, and nothing is updated. `loss_scale` (0-d fp32
    on the device): the factor of the losses in the backward pass; norm and scale divide by it, so
    that no pass over the gradients is needed. `names`: the groups of the parts, in forward order.
    """

    def __init__(
        self,
        device: Device,
        parts: list[Tensor],
        max_norm: float | None,
        losses: Sequence[Tensor] = (),
        loss_scale: Tensor | None = None,
        names: Sequence[str] = (),
    ) -> None:
        self.max_norm = max_norm
        self.skips = False  # a refused step is skipped in silence, and the trainer counts it
        self._names = names
        self.scaled = loss_scale is not None
        self.guards = max_norm is not None or bool(losses) or self.scaled
        self._losses = slice(1, 1 + len(losses))
        self._sizes = [part.numel() for part in parts]
        self._parts = torch.cat([part.reshape(-1) for part in parts]) if parts else None
        total = (
            torch.linalg.vector_norm(self._parts, dtype=torch.float32)
            if self._parts is not None
            else torch.zeros((), device=device.torch_device)
        )
        told = torch.stack([total, *(loss.detach().float() for loss in losses)])
        if loss_scale is not None:
            told = torch.cat([told[:1] / loss_scale, told[1:], loss_scale.reshape(1)])
        self._on_device = told  # norm, losses, loss scale; fp32
        self._on_device_scale: Tensor | None = None
        self._read_scale: float | None = None  # kept, because each group's job asks
        self._host = host_empty(told.shape, torch.float32, pin=device.pins)
        self._transfer: Transfer = device.download(self._host, told)

    def value(self) -> float:
        """Return the norm; waits until the backward pass has finished."""
        self._transfer.wait_host()
        return float(self._host[0])

    def began_in(self) -> str | None:
        """Name the group whose gradient was the first in the backward pass that is not finite, or
        else the largest. Waits for the device."""
        if self._parts is None or len(self._names) != len(self._sizes):
            return None
        parts = self._parts.detach().float().cpu().split(self._sizes)
        named = list(zip(self._names, parts, strict=True))
        broken = [name for name, part in named if not bool(torch.isfinite(part).all())]
        return broken[-1] if broken else max(named, key=lambda each: float(each[1].norm()))[0]

    def losses(self) -> list[float]:
        """Return the losses, in nats a token; waits as `value` does."""
        self._transfer.wait_host()
        return [float(loss) for loss in self._host[self._losses]]

    def loss_scale(self) -> float | None:
        """Return the factor of the losses, None without a loss scale; waits as `value` does."""
        self._transfer.wait_host()
        return float(self._host[-1]) if self.scaled else None

    def overflowed(self) -> bool:
        """Return whether gradients overflowed fp16 at this loss scale, with finite losses. Waits as
        `value` does."""
        return self.scaled and not math.isfinite(self.value()) and self.losses_are_finite()

    def losses_are_finite(self) -> bool:
        """Return whether all losses are finite; waits as `value` does."""
        return all(math.isfinite(loss) for loss in self.losses())

    def is_known(self) -> bool:
        """Return whether the norm is on the host, so that `value` does not wait."""
        return self._transfer.done()

    def refuses(self) -> bool:
        """Return whether the step is refused for a reason that a smaller loss scale does not cure.
        Waits as `value` does."""
        return math.isnan(self.scale()) and not self.overflowed()

    def all_finite(self) -> Tensor:
        """Return, as a boolean on the device, whether norm and losses let the step be made."""
        return torch.isfinite(self._on_device).all()

    def scale(self) -> float:
        """Return the factor of the gradients: 1 without clipping, divided by the loss scale if
        there is one; NaN if the step is refused."""
        if self._read_scale is None:
            norm = self.value()
            if self.guards and not bool(torch.isfinite(self._host).all()):
                self._read_scale = math.nan
            else:
                self._read_scale = clip_scale(norm, self.max_norm) / (self.loss_scale() or 1.0)
        return self._read_scale

    def device_scale(self) -> Tensor:
        """Return `scale()` as an fp32 scalar on the device, computed with the same roundings."""
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
