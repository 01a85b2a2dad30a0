"""torch's GradScaler for wrapped models whose weights are fp16 themselves."""

from __future__ import annotations

import torch
from torch import Tensor


class GradScaler(torch.amp.GradScaler):
    """`torch.amp.GradScaler` that also takes gradients in fp16; used in the same way.

    torch's own refuses to unscale fp16 gradients, because small ones would vanish. Gradients of a
    wrapped model keep their size: the factor is recorded and the update of the fp32 masters applies
    it. (torch.distributed.fsdp's ShardedGradScaler allows them in the same place.)
    """

    def _unscale_grads_(
        self,
        optimizer: torch.optim.Optimizer,
        inv_scale: Tensor,
        found_inf: Tensor,
        allow_fp16: bool,
    ) -> dict[torch.device, Tensor]:
        return super()._unscale_grads_(optimizer, inv_scale, found_inf, allow_fp16=True)
