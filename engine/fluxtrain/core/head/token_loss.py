"""Cross entropy of some tokens over a range of the vocabulary, and the gradient of its logits.

The range is all of the vocabulary, or one vocabulary chunk of a head. Over all of it the logits are
computed once. In chunks a first walk collects the logarithm of the softmax's sum and a second one
computes the logits again and their gradient from it, as in Wijmans et al., Cut Your Losses in
Large-Vocabulary Language Models, 2024 (arXiv:2411.09009), after the online softmax of Milakov and
Gimelshein, 2018 (arXiv:1805.02867).

`PlainLogits` is made of torch operations, which pass ten times over fp32 logits. `FusedLogits`
reads the logits twice in their own dtype in one Triton kernel and writes their gradient over them,
so a chunk may hold four times as many tokens in the same memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fluxtrain.core.device.current_gpu import launching_on
from fluxtrain.core.head.steps import Steps, after, copies_of, pull_back
from fluxtrain.plan.heads import FUSED_LOGITS_BYTES, LOGITS_CHUNK_BYTES

try:
    import triton
    import triton.language as tl
except ImportError:  # torch's CPU builds come without it
    triton = None

_COLUMNS = 8192  # of a row at a time
_SCALED_ROWS = 4096

if triton is not None:

    @triton.jit  # type: ignore[untyped-decorator]
    def _row(  # type: ignore[no-untyped-def]
        logits, targets, scale_at, log_sums, chosen_at, first, width,
        COLLECT: tl.constexpr, SLOPE: tl.constexpr, COLUMNS: tl.constexpr,
    ):  # fmt: skip
        row = tl.program_id(0).to(tl.int64)
        at = logits + row * width
        target = tl.load(targets + row)
        kept = target >= 0
        place = target - first
        columns = tl.arange(0, COLUMNS)
        norm = tl.load(log_sums + row)
        if COLLECT:
            top = norm
            total = tl.where(top == -float("inf"), 0.0, 1.0)
            chosen = tl.load(chosen_at + row)
            for start in range(0, width, COLUMNS):
                here = start + columns
                x = tl.load(at + here, mask=here < width, other=-float("inf")).to(tl.float32)
                higher = tl.maximum(top, tl.max(x, axis=0))
                pivot = tl.where(higher == -float("inf"), 0.0, higher)
                total = total * tl.exp(top - pivot) + tl.sum(tl.exp(x - pivot), axis=0)
                mine = (here == place) & (here < width)
                chosen += tl.sum(tl.where(mine, x, 0.0), axis=0)
                top = higher
            norm = top + tl.log(total)
            tl.store(log_sums + row, norm)
            tl.store(chosen_at + row, chosen)
        if SLOPE:
            factor = tl.where(kept, tl.load(scale_at), 0.0)
            for start in range(0, width, COLUMNS):
                here = start + columns
                x = tl.load(at + here, mask=here < width, other=0.0).to(tl.float32)
                p = tl.exp(x - norm) - tl.where(here == place, 1.0, 0.0)
                slope = tl.where(kept, p * factor, 0.0)
                tl.store(at + here, slope.to(logits.dtype.element_ty), mask=here < width)


@dataclass(frozen=True, kw_only=True)
class VocabRange:
    """A head's weight and bias for a range of the vocabulary, on the device."""

    weight: Tensor  # (w, H)
    bias: Tensor | None  # (w,)
    first: int = 0  # token id of its first row

    @property
    def columns(self) -> slice:
        """Return the token ids in the range."""
        return slice(self.first, self.first + len(self.weight))


@dataclass(frozen=True, kw_only=True)
class SoftmaxSums:
    """Softmax sums of some tokens over the logits of the vocabulary so far."""

    target: Tensor  # (n,) int64, -1 where a token does not count
    log_sums: Tensor  # (n,) fp32: log of the sum of exp(logits) so far
    chosen: Tensor  # (n,) fp32: the target's logit, 0 before its range

    @staticmethod
    def of(target: Tensor) -> SoftmaxSums:
        """Start before the first range."""
        unseen = torch.full(target.shape, -torch.inf, dtype=torch.float32, device=target.device)
        return SoftmaxSums(target=target, log_sums=unseen, chosen=torch.zeros_like(unseen))

    def cut(self, tokens: slice) -> SoftmaxSums:
        """Take some of the tokens; both share memory."""
        return SoftmaxSums(
            target=self.target[tokens], log_sums=self.log_sums[tokens], chosen=self.chosen[tokens]
        )

    def losses(self) -> Tensor:
        """Return the cross entropy of each token (n,) in nats, once all logits were collected."""
        return torch.where(self.target >= 0, self.log_sums - self.chosen, 0.0)


class PlainLogits:
    """Logits of some tokens at a time by torch operations on any device."""

    def __init__(
        self, dtype: torch.dtype, rows: int, tokens: int | None, steps: Steps = ()
    ) -> None:
        self._dtype = dtype  # of the logits as the caller asked for them
        self._steps = steps
        self.tokens = tokens or max(1, LOGITS_CHUNK_BYTES // (4 * rows * copies_of(steps)))

    def compute(
        self,
        hidden: Tensor,
        words: VocabRange,
        sums: SoftmaxSums,
        *,
        collect: bool,
        scale: Tensor | None,
    ) -> Tensor | None:
        """Compute the logits of hidden (n, H), and add them to `sums` if `collect` says so.

        Return the gradient of the sum of all losses times the scale (0-d fp32), by the logits:
        (n, w) in the weights' dtype, valid until the next call. `sums` must know all of the
        vocabulary then. None without a scale.
        """
        product = nn.functional.linear(hidden, words.weight, words.bias).to(self._dtype)
        logits = after(self._steps, product, words.columns).float()
        place = sums.target - words.first
        here = (place >= 0) & (place < len(words.weight)) & (sums.target >= 0)
        wanted = torch.where(here, place, 0).unsqueeze(1)
        if collect:
            sums.log_sums.copy_(torch.logaddexp(sums.log_sums, torch.logsumexp(logits, dim=1)))
            sums.chosen.add_(torch.where(here, logits.gather(1, wanted).squeeze(1), 0.0))
        if scale is None:
            return None
        slope = logits.sub_(sums.log_sums.unsqueeze(1)).exp_()
        slope.scatter_add_(1, wanted, -here.to(slope.dtype).unsqueeze(1))
        slope.mul_(torch.where((sums.target >= 0).unsqueeze(1), scale, 0.0))
        return pull_back(self._steps, product, slope, words.columns).to(words.weight.dtype)


class FusedLogits:
    """Logits of some tokens at a time by the kernel above, in memory that all chunks share."""

    def __init__(
        self, weights: torch.dtype, rows: int, tokens: int | None, most: int, steps: Steps = ()
    ) -> None:
        limit = max(1, FUSED_LOGITS_BYTES // (weights.itemsize * rows * copies_of(steps)))
        self._steps = steps
        self._rows = rows
        self.tokens = min(tokens or limit, most)
        self._flat: Tensor | None = None

    def compute(
        self,
        hidden: Tensor,
        words: VocabRange,
        sums: SoftmaxSums,
        *,
        collect: bool,
        scale: Tensor | None,
    ) -> Tensor | None:
        """Compute as `PlainLogits.compute` does."""
        product = self._product(hidden, words)
        logits = after(self._steps, product, words.columns)
        kernel: Any = _row
        with launching_on(logits):
            kernel[(len(logits),)](
                logits, sums.target, sums.log_sums if scale is None else scale, sums.log_sums,
                sums.chosen, words.first, logits.shape[1],
                COLLECT=collect, SLOPE=scale is not None, COLUMNS=_COLUMNS, num_warps=16,
            )  # fmt: skip
        if scale is None:
            return None
        return pull_back(self._steps, product, logits, words.columns).to(product.dtype)

    def _product(self, hidden: Tensor, words: VocabRange) -> Tensor:
        weight, shape = words.weight, (len(hidden), len(words.weight))
        if self._flat is None:
            size = self.tokens * self._rows
            self._flat = torch.empty(size, dtype=weight.dtype, device=weight.device)
        logits = self._flat[: shape[0] * shape[1]].view(shape)
        if words.bias is None:
            return torch.mm(hidden, weight.t(), out=logits)
        return torch.addmm(words.bias, hidden, weight.t(), out=logits)


def logits_of(
    hidden: Tensor,
    weights: torch.dtype,
    dtype: torch.dtype,
    rows: int,
    tokens: int | None,
    steps: Steps = (),
) -> PlainLogits | FusedLogits:
    """Return the fastest way for hidden (N, H) and ranges of at most `rows` of the vocabulary, with
    weights in `weights` and the product asked for in `dtype`; `tokens` at a time, None: by memory.
    """
    exact = dtype in (weights, torch.float32)
    if triton is not None and hidden.is_cuda and exact and len(hidden):
        return FusedLogits(weights, rows, tokens, len(hidden), steps)
    return PlainLogits(dtype, rows, tokens, steps)


@dataclass(frozen=True, kw_only=True)
class WholeLoss:
    """Tensors and settings of a loss over all of the vocabulary at once."""

    words: VocabRange  # all
    target: Tensor  # (N,) int64, -1 where a token does not count
    scale: Tensor | None  # 0-d fp32 that gradients are multiplied by; None: none are wanted
    dtype: torch.dtype  # of the logits as the caller asked for them
    steps: Steps = ()  # what is done with the logits before the loss

    def logits(self, hidden: Tensor, tokens: int | None) -> PlainLogits | FusedLogits:
        """Return the fastest way to compute them; `tokens` at a time, None: by memory."""
        weight = self.words.weight
        return logits_of(hidden, weight.dtype, self.dtype, len(weight), tokens, self.steps)

    def compute(
        self, logits: PlainLogits | FusedLogits, hidden: Tensor, tokens: slice, losses: Tensor
    ) -> Tensor | None:
        """Write the cross entropy of `tokens`, whose hidden states are (n, H), to `losses` (n,).
        Returns the result of `PlainLogits.compute`."""
        sums = SoftmaxSums.of(self.target[tokens])
        slope = logits.compute(hidden, self.words, sums, collect=True, scale=self.scale)
        losses.copy_(sums.losses())
        return slope


@dataclass
class HeadGradients:
    """Where the gradients of a loss go; None: not wanted."""

    hidden: Tensor | None = None  # (N, H), each token's
    weight: Tensor | None = None  # (V, H) fp32, added to
    bias: Tensor | None = None  # (V,) fp32, added to

    def add(self, slope: Tensor, hidden: Tensor) -> None:
        """Add the contribution of the gradient (n, V) of some tokens' logits, hidden (n, H), to
        the head's gradients."""
        if self.weight is not None:
            add_product_(self.weight, slope.t(), hidden)
        if self.bias is not None:
            self.bias += slope.sum(0, dtype=torch.float32)


def loss_of_tokens(
    loss: WholeLoss, hidden: Tensor, losses: Tensor, gradients: HeadGradients, tokens: int | None
) -> None:
    """Write the cross entropy of hidden (N, H) to `losses` (N,), in nats, and its gradients to
    `gradients`, in chunks of `tokens` (None: by memory)."""
    logits = loss.logits(hidden, tokens)
    for chunk in spans(len(hidden), logits.tokens):
        loss_of_chunk(loss, logits, hidden, chunk, losses, gradients)


def loss_of_chunk(
    loss: WholeLoss,
    logits: PlainLogits | FusedLogits,
    hidden: Tensor,
    chunk: slice,
    losses: Tensor,
    gradients: HeadGradients,
) -> None:
    """Compute `loss_of_tokens` for one chunk of tokens."""
    slope = loss.compute(logits, hidden[chunk], chunk, losses[chunk])  # (n, V)
    if slope is None:
        return
    if gradients.hidden is not None:
        torch.mm(slope, loss.words.weight, out=gradients.hidden[chunk])
    gradients.add(slope, hidden[chunk])


def spans(count: int, most: int) -> list[slice]:
    """Cut `count` tokens into ranges of `most`."""
    return [slice(at, min(count, at + most)) for at in range(0, count, max(1, most))]


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


def scaled(values: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Multiply values (N, H) by the scale, in place where they are in `dtype` or fp32, and return
    them in `dtype`. They are scaled in fp32, some rows at a time: 1/n rounded to bf16 first is off
    by up to 0.4 %."""
    if values.dtype == dtype == torch.float32:
        return values.mul_(scale)
    found = values if values.dtype == dtype else torch.empty_like(values, dtype=dtype)
    for to, part in zip(found.split(_SCALED_ROWS), values.split(_SCALED_ROWS), strict=True):
        to.copy_(part.float().mul_(scale))
    return found
