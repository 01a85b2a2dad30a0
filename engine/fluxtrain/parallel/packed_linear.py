"""Frozen linear layers whose weights are packed in 4 or 8 bits (QLoRA).

Their bytes are stored as numbers of the dtype that computes, which FSDP2 gathers without looking at
them: torch 2.11 cannot shard bytes.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from fluxtrain.core.quantization.layout import PackedLayout
from fluxtrain.core.quantization.packing import pack, unpack
from fluxtrain.plan.states import LEAST_PACKED, StorageFormat


def pack_frozen(block: nn.Module, storage: StorageFormat, compute: torch.dtype) -> list[str]:
    """Pack the large frozen weights of a block's linear layers, one after the other; return their
    names."""
    assert storage != "plain"
    names = []
    for name, module in block.named_modules():
        weight = getattr(module, "weight", None)
        if type(module) is not nn.Linear or weight is None or weight.requires_grad:
            continue
        if weight.numel() < LEAST_PACKED:
            continue
        layout = PackedLayout.of(storage, [weight.shape])
        whole = -(-layout.size_bytes // compute.itemsize) * compute.itemsize
        packed = torch.zeros(whole, dtype=torch.uint8)
        pack(layout, 0, weight, packed[: layout.size_bytes], name=f"{name}.weight")
        module.weight = nn.Parameter(packed.view(compute), requires_grad=False)
        module.forward = _forward(module, layout, compute)  # type: ignore[method-assign]
        names.append(f"{name}.weight")
    return names


def _forward(module: Any, layout: PackedLayout, compute: torch.dtype) -> Any:
    def forward(rows: Tensor) -> Tensor:
        apply: Any = _PackedMatmul.apply
        out: Tensor = apply(rows, module.weight, layout, compute)
        bias: Tensor | None = module.bias
        return out if bias is None else out + bias

    return forward


class _PackedMatmul(torch.autograd.Function):
    """`rows @ weight.T`, whose weight is unpacked in both passes and kept in none."""

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, packed: Tensor, layout: PackedLayout, compute: torch.dtype
    ) -> Tensor:
        ctx.save_for_backward(packed)
        ctx.layout, ctx.compute = layout, compute
        return rows @ _dense(packed, layout, compute).T

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        (packed,) = ctx.saved_tensors
        return gradients[0] @ _dense(packed, ctx.layout, ctx.compute), None, None, None


def _dense(packed: Tensor, layout: PackedLayout, compute: torch.dtype) -> Tensor:
    flat = torch.empty(layout.elements, dtype=compute, device=packed.device)
    unpack(layout, packed.contiguous().view(torch.uint8)[: layout.size_bytes], flat)
    place = layout.weights[0]
    return flat[place.first : place.first + place.count].view(place.shape)
