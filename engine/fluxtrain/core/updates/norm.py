"""The global gradient norm, computed on the device and read without stopping the device, and
clipping by it as torch.nn.utils.clip_grad_norm_ defines it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from ctypes import c_float

import torch
from torch import Tensor

from fluxtrain.core.device.device import Device, Transfer
from fluxtrain.core.device.page_locks import host_empty
from fluxtrain.core.ranks.exchange import NOT_EXCHANGED, Exchange

_EPS = c_float(1e-6).value


class GradNorm:
    """2-norm over all gradients of a step (before clipping), on its way to the host.

    `losses` (scalars) are downloaded with it. With a limit or losses it guards the update: if the
    norm or a loss is not finite, the scale is NaN, and nothing is updated. `loss_scale` (0-d fp32
    on the device): the factor of the losses in the backward pass; norm and scale divide by it, so
    that no pass over the gradients is needed. `names`: the groups of the parts, in forward order.
    `exchange`: losses of several processes become one, so that all decide alike.
    """

    def __init__(
        self,
        device: Device,
        parts: list[Tensor],
        max_norm: float | None,
        losses: Sequence[Tensor] = (),
        loss_scale: Tensor | None = None,
        names: Sequence[str] = (),
        exchange: Exchange = NOT_EXCHANGED,
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
        sent = torch.stack([total, *(loss.detach().float() for loss in losses)])
        if losses and exchange.ranks.world > 1:
            sent = torch.cat([sent[:1], exchange.numbers(sent[1:])])
        if loss_scale is not None:
            sent = torch.cat([sent[:1] / loss_scale, sent[1:], loss_scale.reshape(1)])
        self._on_device = sent  # norm, losses, loss scale; fp32
        self._on_device_scale: Tensor | None = None
        self._read_scale: float | None = None  # kept, because each group's job asks
        self._host = host_empty(sent.shape, torch.float32, pin=device.pins)
        self._transfer: Transfer = device.download(self._host, sent)

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


def clip_scale(norm: float, max_norm: float | None) -> float:
    """Return the factor of gradients of global `norm`: max_norm / (norm + 1e-6), at most 1.

    In fp32 with torch's roundings (it multiplies max_norm by a reciprocal), so that clipping gives
    torch's bits. NaN stays NaN; max_norm None never clips.
    """
    if max_norm is None:
        return 1.0
    reciprocal = c_float(1.0 / c_float(c_float(norm).value + _EPS).value).value
    scale = c_float(reciprocal * c_float(max_norm).value).value
    return 1.0 if scale > 1.0 else scale


def clip_scale_on_device(norm: Tensor, max_norm: float) -> Tensor:
    """Compute `clip_scale` of an fp32 scalar on its device, with the same roundings. Dividing
    `max_norm` by the norm would round once instead of twice: equal for powers of two alone."""
    return torch.clamp(torch.reciprocal(norm + _EPS) * max_norm, max=1.0)
