"""Logits over one slice of the words, for one chunk of tokens: the logarithm of a softmax's sum is
collected slice by slice in a first pass, and slopes are computed with it in a second one.

As in Wijmans et al., Cut Your Losses in Large-Vocabulary Language Models, 2024 (arXiv:2411.09009),
after the online softmax of Milakov and Gimelshein, 2018 (arXiv:1805.02867).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fluxtrain.device.current_gpu import launching_on
from fluxtrain.plan.heads import FUSED_LOGITS_BYTES, LOGITS_CHUNK_BYTES

try:
    import triton
    import triton.language as tl
except ImportError:  # torch's CPU builds come without it
    triton = None

_COLUMNS = 8192  # of a row at a time

if triton is not None:

    @triton.jit  # type: ignore[untyped-decorator]
    def _collect(  # type: ignore[no-untyped-def]
        logits, targets, log_sums, chosen_at, first, width, COLUMNS: tl.constexpr
    ):  # fmt: skip
        row = tl.program_id(0).to(tl.int64)
        at = logits + row * width
        target = tl.load(targets + row) - first
        columns = tl.arange(0, COLUMNS)
        top = tl.load(log_sums + row)
        total = tl.where(top == -float("inf"), 0.0, 1.0)
        chosen = tl.load(chosen_at + row)
        for start in range(0, width, COLUMNS):
            here = start + columns
            x = tl.load(at + here, mask=here < width, other=-float("inf")).to(tl.float32)
            higher = tl.maximum(top, tl.max(x, axis=0))
            pivot = tl.where(higher == -float("inf"), 0.0, higher)
            total = total * tl.exp(top - pivot) + tl.sum(tl.exp(x - pivot), axis=0)
            mine = (here == target) & (here < width)
            chosen += tl.sum(tl.where(mine, x, 0.0), axis=0)
            top = higher
        tl.store(log_sums + row, top + tl.log(total))
        tl.store(chosen_at + row, chosen)

    @triton.jit  # type: ignore[untyped-decorator]
    def _slope(  # type: ignore[no-untyped-def]
        logits, targets, log_sums, scale_at, first, width, COLUMNS: tl.constexpr
    ):  # fmt: skip
        row = tl.program_id(0).to(tl.int64)
        at = logits + row * width
        target = tl.load(targets + row)
        kept = target >= 0
        norm = tl.load(log_sums + row)
        factor = tl.where(kept, tl.load(scale_at), 0.0)
        columns = tl.arange(0, COLUMNS)
        for start in range(0, width, COLUMNS):
            here = start + columns
            x = tl.load(at + here, mask=here < width, other=0.0).to(tl.float32)
            p = tl.exp(x - norm) - tl.where(here == target - first, 1.0, 0.0)
            slope = tl.where(kept, p * factor, 0.0)
            tl.store(at + here, slope.to(logits.dtype.element_ty), mask=here < width)


@dataclass(frozen=True, kw_only=True)
class Words:
    """One slice of a head on the device."""

    weight: Tensor  # (w, H)
    bias: Tensor | None  # (w,)
    first: int  # word


@dataclass(frozen=True, kw_only=True)
class Tokens:
    """What is known of tokens: all of a loss, or the chunk of it that `cut` gives."""

    target: Tensor  # (n,) int64, -1 where a token does not count
    log_sums: Tensor  # (n,) fp32: log of the sum of exp(logits) over the slices so far
    chosen: Tensor  # (n,) fp32: the target's logit, 0 before its slice

    @staticmethod
    def of(target: Tensor) -> Tokens:
        """Before the first slice."""
        unseen = torch.full(target.shape, -torch.inf, dtype=torch.float32, device=target.device)
        return Tokens(target=target, log_sums=unseen, chosen=torch.zeros_like(unseen))

    def cut(self, rows: slice) -> Tokens:
        return Tokens(
            target=self.target[rows], log_sums=self.log_sums[rows], chosen=self.chosen[rows]
        )


class PlainSlices:
    """By torch operations on any device."""

    def __init__(self, dtype: torch.dtype, words: int, tokens: int | None) -> None:
        self._dtype = dtype  # of the logits as the caller asked for them
        self.tokens = tokens or max(1, LOGITS_CHUNK_BYTES // (4 * words))

    def collect(self, hidden: Tensor, words: Words, tokens: Tokens) -> None:
        """Take the slice's logits of hidden (n, H) into `tokens`."""
        logits = self._logits(hidden, words)
        tokens.log_sums.copy_(torch.logaddexp(tokens.log_sums, torch.logsumexp(logits, dim=1)))
        here, wanted = _within(tokens.target, words)
        tokens.chosen.add_(torch.where(here, logits.gather(1, wanted).squeeze(1), 0.0))

    def slope(self, hidden: Tensor, words: Words, tokens: Tokens, scale: Tensor) -> Tensor:
        """The slope of the sum of all losses times the scale (0-d fp32), (n, w) in the weights'
        dtype, valid until the next call."""
        slope = self._logits(hidden, words).sub_(tokens.log_sums.unsqueeze(1)).exp_()
        here, wanted = _within(tokens.target, words)
        slope.scatter_add_(1, wanted, -here.to(slope.dtype).unsqueeze(1))
        kept = (tokens.target >= 0).unsqueeze(1)
        return slope.mul_(torch.where(kept, scale, 0.0)).to(words.weight.dtype)

    def _logits(self, hidden: Tensor, words: Words) -> Tensor:
        return nn.functional.linear(hidden, words.weight, words.bias).to(self._dtype).float()


class FusedSlices:
    """By the kernels above, which read logits in their own dtype; see `slices_of`."""

    def __init__(
        self, weights: torch.dtype, device: torch.device, words: int, tokens: int | None, most: int
    ) -> None:
        limit = max(1, FUSED_LOGITS_BYTES // (weights.itemsize * words))
        self.tokens = min(tokens or limit, most)
        self._flat = torch.empty(self.tokens * words, dtype=weights, device=device)

    def collect(self, hidden: Tensor, words: Words, tokens: Tokens) -> None:
        """As `PlainSlices.collect`."""
        logits = self._logits(hidden, words)
        kernel: Any = _collect
        with launching_on(logits):
            kernel[(len(logits),)](
                logits, tokens.target, tokens.log_sums, tokens.chosen, words.first, logits.shape[1],
                COLUMNS=_COLUMNS, num_warps=16,
            )  # fmt: skip

    def slope(self, hidden: Tensor, words: Words, tokens: Tokens, scale: Tensor) -> Tensor:
        """As `PlainSlices.slope`."""
        logits = self._logits(hidden, words)
        kernel: Any = _slope
        with launching_on(logits):
            kernel[(len(logits),)](
                logits, tokens.target, tokens.log_sums, scale, words.first, logits.shape[1],
                COLUMNS=_COLUMNS, num_warps=16,
            )  # fmt: skip
        return logits

    def _logits(self, hidden: Tensor, words: Words) -> Tensor:
        shape = len(hidden), len(words.weight)
        logits = self._flat[: shape[0] * shape[1]].view(shape)
        if words.bias is None:
            return torch.mm(hidden, words.weight.t(), out=logits)
        return torch.addmm(words.bias, hidden, words.weight.t(), out=logits)


def slices_of(
    weights: torch.dtype, hidden: Tensor, dtype: torch.dtype, words: int, tokens: int | None
) -> PlainSlices | FusedSlices:
    """The fastest way there is for hidden (N, H) and slices of so many words, with weights in
    `weights` and logits asked for in `dtype`; `tokens` a chunk, None by memory."""
    exact = dtype in (weights, torch.float32)
    if triton is not None and hidden.is_cuda and exact and len(hidden):
        return FusedSlices(weights, hidden.device, words, tokens, len(hidden))
    return PlainSlices(dtype, words, tokens)


def _within(target: Tensor, words: Words) -> tuple[Tensor, Tensor]:
    """Which targets (n,) are words of the slice, and where each is there (n, 1); 0 for others."""
    place = target - words.first
    here = (place >= 0) & (place < len(words.weight)) & (target >= 0)
    return here, torch.where(here, place, 0).unsqueeze(1)
