"""Logits of one vocabulary chunk for some tokens: a first pass over the chunks collects the
logarithm of the softmax's sum, and a second pass computes the slopes from it.

As in Wijmans et al., Cut Your Losses in Large-Vocabulary Language Models, 2024 (arXiv:2411.09009),
after the online softmax of Milakov and Gimelshein, 2018 (arXiv:1805.02867).
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
class VocabChunk:
    """One vocabulary chunk of a head on the device."""

    weight: Tensor  # (w, H)
    bias: Tensor | None  # (w,)
    first: int  # token id of its first row

    @property
    def columns(self) -> slice:
        """The words of the vocabulary that it has."""
        return slice(self.first, self.first + len(self.weight))


@dataclass(frozen=True, kw_only=True)
class Tokens:
    """Results so far for the tokens of a loss, or for some of them (`cut`)."""

    target: Tensor  # (n,) int64, -1 where a token does not count
    log_sums: Tensor  # (n,) fp32: log of the sum of exp(logits) over the chunks so far
    chosen: Tensor  # (n,) fp32: the target's logit, 0 before its chunk

    @staticmethod
    def of(target: Tensor) -> Tokens:
        """Start before the first vocabulary chunk."""
        unseen = torch.full(target.shape, -torch.inf, dtype=torch.float32, device=target.device)
        return Tokens(target=target, log_sums=unseen, chosen=torch.zeros_like(unseen))

    def cut(self, rows: slice) -> Tokens:
        """Take some of the tokens; both share memory."""
        return Tokens(
            target=self.target[rows], log_sums=self.log_sums[rows], chosen=self.chosen[rows]
        )


class PlainVocabChunks:
    """Vocabulary chunks by torch operations on any device."""

    def __init__(
        self, dtype: torch.dtype, rows: int, tokens: int | None, steps: Steps = ()
    ) -> None:
        self._dtype = dtype  # of the logits as the caller asked for them
        self._steps = steps
        self.tokens = tokens or max(1, LOGITS_CHUNK_BYTES // (4 * rows * copies_of(steps)))

    def collect(self, hidden: Tensor, chunk: VocabChunk, tokens: Tokens) -> None:
        """Add the chunk's logits of hidden (n, H) to the sums of `tokens`."""
        logits = after(self._steps, self._product(hidden, chunk), chunk.columns).float()
        tokens.log_sums.copy_(torch.logaddexp(tokens.log_sums, torch.logsumexp(logits, dim=1)))
        here, wanted = _within(tokens.target, chunk)
        tokens.chosen.add_(torch.where(here, logits.gather(1, wanted).squeeze(1), 0.0))

    def slope(self, hidden: Tensor, chunk: VocabChunk, tokens: Tokens, scale: Tensor) -> Tensor:
        """Return the slope of the sum of all losses times the scale (0-d fp32), (n, w) in the
        weights' dtype, valid until the next call."""
        product = self._product(hidden, chunk)
        logits = after(self._steps, product, chunk.columns).float()
        slope = logits.sub_(tokens.log_sums.unsqueeze(1)).exp_()
        here, wanted = _within(tokens.target, chunk)
        slope.scatter_add_(1, wanted, -here.to(slope.dtype).unsqueeze(1))
        kept = (tokens.target >= 0).unsqueeze(1)
        slope.mul_(torch.where(kept, scale, 0.0))
        return pull_back(self._steps, product, slope, chunk.columns).to(chunk.weight.dtype)

    def _product(self, hidden: Tensor, chunk: VocabChunk) -> Tensor:
        return nn.functional.linear(hidden, chunk.weight, chunk.bias).to(self._dtype)


class FusedVocabChunks:
    """Vocabulary chunks by the kernels above, which read logits in their own dtype."""

    def __init__(
        self,
        weights: torch.dtype,
        device: torch.device,
        rows: int,
        tokens: int | None,
        most: int,
        steps: Steps = (),
    ) -> None:
        limit = max(1, FUSED_LOGITS_BYTES // (weights.itemsize * rows * copies_of(steps)))
        self._steps = steps
        self.tokens = min(tokens or limit, most)
        self._flat = torch.empty(self.tokens * rows, dtype=weights, device=device)

    def collect(self, hidden: Tensor, chunk: VocabChunk, tokens: Tokens) -> None:
        """As `PlainVocabChunks.collect`."""
        logits = after(self._steps, self._product(hidden, chunk), chunk.columns)
        kernel: Any = _collect
        with launching_on(logits):
            kernel[(len(logits),)](
                logits, tokens.target, tokens.log_sums, tokens.chosen, chunk.first, logits.shape[1],
                COLUMNS=_COLUMNS, num_warps=16,
            )  # fmt: skip

    def slope(self, hidden: Tensor, chunk: VocabChunk, tokens: Tokens, scale: Tensor) -> Tensor:
        """As `PlainVocabChunks.slope`."""
        product = self._product(hidden, chunk)
        logits = after(self._steps, product, chunk.columns)
        kernel: Any = _slope
        with launching_on(logits):
            kernel[(len(logits),)](
                logits, tokens.target, tokens.log_sums, scale, chunk.first, logits.shape[1],
                COLUMNS=_COLUMNS, num_warps=16,
            )  # fmt: skip
        return pull_back(self._steps, product, logits, chunk.columns).to(product.dtype)

    def _product(self, hidden: Tensor, chunk: VocabChunk) -> Tensor:
        shape = len(hidden), len(chunk.weight)
        logits = self._flat[: shape[0] * shape[1]].view(shape)
        if chunk.bias is None:
            return torch.mm(hidden, chunk.weight.t(), out=logits)
        return torch.addmm(chunk.bias, hidden, chunk.weight.t(), out=logits)


def vocab_chunks_of(
    weights: torch.dtype,
    hidden: Tensor,
    dtype: torch.dtype,
    rows: int,
    tokens: int | None,
    steps: Steps = (),
) -> PlainVocabChunks | FusedVocabChunks:
    """Return the fastest way for hidden (N, H) and vocabulary chunks of `rows`, with weights in
    `weights` and the product asked for in `dtype`; `tokens` at a time, None: by memory."""
    exact = dtype in (weights, torch.float32)
    if triton is not None and hidden.is_cuda and exact and len(hidden):
        return FusedVocabChunks(weights, hidden.device, rows, tokens, len(hidden), steps)
    return PlainVocabChunks(dtype, rows, tokens, steps)


def _within(target: Tensor, chunk: VocabChunk) -> tuple[Tensor, Tensor]:
    """Tell which targets (n,) are in the chunk, and the row (n, 1) of each there; 0 for others."""
    place = target - chunk.first
    here = (place >= 0) & (place < len(chunk.weight)) & (target >= 0)
    return here, torch.where(here, place, 0).unsqueeze(1)
