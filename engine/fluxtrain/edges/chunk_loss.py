"""Logits, cross entropy and its slope for one chunk of tokens.

`PlainChunks` is made of torch operations, which pass ten times over fp32 logits. `FusedChunks`
reads the logits twice in their own dtype in one Triton kernel and writes the slope over them, so a
chunk may hold four times as many tokens in the same memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fluxtrain.device.current_gpu import launching_on
from fluxtrain.edges.steps import Steps, after, copies_of, pull_back
from fluxtrain.plan.heads import FUSED_LOGITS_BYTES, LOGITS_CHUNK_BYTES

try:
    import triton
    import triton.language as tl
except ImportError:  # torch's CPU builds come without it
    triton = None

_COLUMNS = 8192  # of a row at a time

if triton is not None:

    @triton.jit  # type: ignore[untyped-decorator]
    def _row(  # type: ignore[no-untyped-def]
        logits, targets, scale_at, losses, width, SLOPE: tl.constexpr, COLUMNS: tl.constexpr
    ):  # fmt: skip
        row = tl.program_id(0).to(tl.int64)
        at = logits + row * width
        target = tl.load(targets + row)
        kept = target >= 0
        columns = tl.arange(0, COLUMNS)
        top = -float("inf")
        total = 0.0
        chosen = 0.0
        for start in range(0, width, COLUMNS):
            here = start + columns
            x = tl.load(at + here, mask=here < width, other=-float("inf")).to(tl.float32)
            higher = tl.maximum(top, tl.max(x, axis=0))
            pivot = tl.where(higher == -float("inf"), 0.0, higher)
            total = total * tl.exp(top - pivot) + tl.sum(tl.exp(x - pivot), axis=0)
            chosen += tl.sum(tl.where(here == target, x, 0.0), axis=0)
            top = higher
        norm = top + tl.log(total)
        tl.store(losses + row, tl.where(kept, norm - chosen, 0.0))
        if SLOPE:
            factor = tl.where(kept, tl.load(scale_at), 0.0)
            for start in range(0, width, COLUMNS):
                here = start + columns
                x = tl.load(at + here, mask=here < width, other=0.0).to(tl.float32)
                p = tl.exp(x - norm) - tl.where(here == target, 1.0, 0.0)
                slope = tl.where(kept, p * factor, 0.0)
                tl.store(at + here, slope.to(logits.dtype.element_ty), mask=here < width)


@dataclass(frozen=True, kw_only=True)
class HeadLoss:
    """The tensors and settings that all chunks of one loss share."""

    weight: Tensor  # (V, H)
    bias: Tensor | None  # (V,)
    target: Tensor  # (N,) int64, -1 where a token does not count
    scale: Tensor  # 0-d fp32 that slopes are multiplied by
    dtype: torch.dtype  # of the logits as the caller asked for them
    steps: Steps = ()  # what is done with the logits before the loss
    wants_slope: bool


class PlainChunks:
    """Chunks of tokens by torch operations on any device."""

    def __init__(self, head: HeadLoss, tokens: int | None) -> None:
        self._head = head
        self.tokens = tokens_at_once(head, tokens)

    def slope(self, hidden: Tensor, rows: slice, losses: Tensor) -> Tensor | None:
        """Write the cross entropy of hidden (n, H), in nats, to `losses` (n,). Return the slope of
        the sum of all losses times the scale, (n, V) in the weights' dtype, valid until the next
        chunk; None where no slope is wanted."""
        head = self._head
        product = nn.functional.linear(hidden, head.weight, head.bias).to(head.dtype)
        logits = after(head.steps, product).float()
        target = head.target[rows].unsqueeze(1)
        kept, wanted = target >= 0, target.clamp(min=0)
        norm = torch.logsumexp(logits, dim=1, keepdim=True)
        each = norm - logits.gather(1, wanted)
        losses.copy_(torch.where(kept, each, 0.0).squeeze(1))
        if not head.wants_slope:
            return None
        slope = logits.sub_(norm).exp_()
        slope.scatter_add_(1, wanted, torch.full_like(each, -1.0))
        slope.mul_(kept * head.scale)
        return pull_back(head.steps, product, slope).to(head.weight.dtype)


class FusedChunks:
    """Chunks of tokens by the kernel above; `chunks_of` says when."""

    def __init__(self, head: HeadLoss, tokens: int | None) -> None:
        self._head = head
        self.tokens = tokens_at_once(head, tokens)
        self._product = torch.empty(
            (self.tokens, head.weight.shape[0]), dtype=head.weight.dtype, device=head.weight.device
        )

    def slope(self, hidden: Tensor, rows: slice, losses: Tensor) -> Tensor | None:
        """As `PlainChunks.slope`."""
        head, product = self._head, self._product[: len(losses)]
        if head.bias is None:
            torch.mm(hidden, head.weight.t(), out=product)
        else:
            torch.addmm(head.bias, hidden, head.weight.t(), out=product)
        logits = after(head.steps, product)
        kernel: Any = _row
        with launching_on(logits):
            kernel[(len(losses),)](
                logits, head.target[rows], head.scale, losses, logits.shape[1],
                SLOPE=head.wants_slope, COLUMNS=_COLUMNS, num_warps=16,
            )  # fmt: skip
        if not head.wants_slope:
            return None
        return pull_back(head.steps, product, logits).to(product.dtype)


def chunks_of(head: HeadLoss, tokens: int | None) -> PlainChunks | FusedChunks:
    """Return the fastest way to compute the loss; `tokens` a chunk, None: by memory."""
    return FusedChunks(head, tokens) if _is_fused(head) else PlainChunks(head, tokens)


def tokens_at_once(head: HeadLoss, tokens: int | None) -> int:
    """Return how many tokens a chunk has; `tokens` as asked, None: by memory."""
    width, copies = head.weight.shape[0], copies_of(head.steps)
    if not _is_fused(head):
        return tokens or max(1, LOGITS_CHUNK_BYTES // (4 * width * copies))
    limit = max(1, FUSED_LOGITS_BYTES // (head.weight.itemsize * width * copies))
    return min(tokens or limit, len(head.target))


def _is_fused(head: HeadLoss) -> bool:
    exact = head.dtype in (head.weight.dtype, torch.float32)
    return triton is not None and head.weight.is_cuda and exact and len(head.target) > 0


@dataclass
class TokenSums:
    """Where the gradients of a loss over tokens go; None: not wanted."""

    hidden: Tensor | None = None  # (N, H), each token's
    weight: Tensor | None = None  # (V, H) fp32, added to
    bias: Tensor | None = None  # (V,) fp32, added to

    def of(self, rows: slice) -> TokenSums:
        """Return the same for a range of the tokens."""
        return TokenSums(None if self.hidden is None else self.hidden[rows], self.weight, self.bias)

    def add(self, slope: Tensor, hidden: Tensor) -> None:
        """Add what the slopes (n, V) of some tokens, hidden (n, H), give to the head's own."""
        if self.weight is not None:
            add_product_(self.weight, slope.t(), hidden)
        if self.bias is not None:
            self.bias += slope.sum(0, dtype=torch.float32)

    def like(self, hidden: Tensor) -> TokenSums:
        """Return new ones, zero, for other tokens (n, H) beside them."""

        def zeros(total: Tensor | None) -> Tensor | None:
            if total is None:
                return None
            return torch.zeros(total.shape, dtype=total.dtype, device=hidden.device)

        gradient = None if self.hidden is None else torch.empty_like(hidden)
        return TokenSums(gradient, zeros(self.weight), zeros(self.bias))


def loss_of_tokens(
    head: HeadLoss, hidden: Tensor, losses: Tensor, sums: TokenSums, tokens: int | None
) -> None:
    """Write the cross entropy of hidden (N, H) to `losses` (N,), in nats, and add its gradients to
    `sums`, in chunks of `tokens` (None: by memory)."""
    chunks = chunks_of(head, tokens)
    for start in range(0, hidden.shape[0], max(1, chunks.tokens)):
        loss_of_chunk(chunks, head, hidden, slice(start, start + chunks.tokens), losses, sums)


def loss_of_chunk(
    chunks: PlainChunks | FusedChunks,
    head: HeadLoss,
    hidden: Tensor,
    rows: slice,
    losses: Tensor,
    sums: TokenSums,
) -> None:
    """Do what `loss_of_tokens` does for the tokens `rows`, which are a chunk or fewer."""
    slope = chunks.slope(hidden[rows], rows, losses[rows])  # (n, V)
    if slope is None:
        return
    if sums.hidden is not None:
        torch.mm(slope, head.weight, out=sums.hidden[rows])
    sums.add(slope, hidden[rows])


def add_product_(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Add left (a, b) @ right (b, c) to total (a, c) fp32, without rounding the product first where
    the device's library has such a product."""
    if left.dtype == total.dtype:
        total.addmm_(left, right)
    elif total.is_cuda and hasattr(torch.ops.aten.addmm, "dtype_out"):
        torch.ops.aten.addmm.dtype_out(total, left, right, torch.float32, out=total)
    elif left.dtype == torch.float16:  # a product of many tokens is beyond its range
        total.addmm_(left.float(), right.float())
    else:
        total += left @ right
