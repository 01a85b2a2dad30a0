"""How far two models' logits are apart, and how far rounding alone may put them. Numbers alone.

Two computations of one function differ by their roundings. A number is rounded by at most `u` of
itself (2**-8 for bf16, 2**-11 for fp16, 2**-24 for fp32), and roundings are independent, so after
`n` of them one behind the other a value is off by about sqrt(n) * u of its size. A logit's size is
the spread of the logits over the vocabulary. If each logit is off by `d`, the mean KL divergence is
about d**2 / 2, and the largest of millions of differences about six times `d`. Sums are in fp32: a
sum of thousands of products is off by up to `SUMS` of itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fluxtrain.events.answers.answers import ComparedLayers, ComparedLogits

ROUNDINGS_A_BLOCK = 8  # on the residual stream and what is added to it: products, norms, sums
ROUNDINGS_BESIDE = 8  # embedding, last norm, head, and the weights themselves
KL_MARGIN = 4.0  # of the expected mean KL: twice the expected difference
LARGEST_MARGIN = 12.0  # times `d`: twice six
SUMS = 2.0**-18
_POSITIONS = 64  # at a time, in fp64
_ELEMENTS = 1 << 20  # of a weight, at a time, in fp64


def unit_roundoff(dtype: torch.dtype) -> float:
    """Return the most that rounding to `dtype` changes a number, relative to it."""
    return torch.finfo(dtype).eps / 2


def agreement(
    expected: Tensor, found: Tensor, roundoff: float, blocks: int, *, source: str, rows: int
) -> ComparedLogits:
    """Compare logits (N, V) of two models of `blocks` blocks on tokens of `rows` rows of `source`.

    roundoff: the most that the coarser one changes a number, relative to it."""
    kl, same, spread = 0.0, 0, 0.0
    worst: list[Tensor] = []
    for start in range(0, len(expected), _POSITIONS):
        a = expected[start : start + _POSITIONS].double()
        b = found[start : start + _POSITIONS].double()
        p, q = a.log_softmax(-1), b.log_softmax(-1)
        kl += float((p.exp() * (p - q)).sum())
        worst.append((a - b).abs().max())
        same += int((a.argmax(-1) == b.argmax(-1)).sum())
        spread += float(a.std(-1).sum())
    count = len(expected)
    roundings = ROUNDINGS_A_BLOCK * blocks + ROUNDINGS_BESIDE
    off = (roundoff + SUMS) * roundings**0.5 * spread / count
    return ComparedLogits(
        source=source,
        rows=rows,
        tokens=count,
        mean_kl=kl / count,
        kl_limit=KL_MARGIN * off**2 / 2,
        largest=float(torch.stack(worst).max()),  # NaN comes through
        largest_limit=LARGEST_MARGIN * off,
        top1=same / count,
    )


@dataclass(frozen=True, kw_only=True)
class RoundedWeight:
    """A merged weight as it is written, and its sum with the adapter in fp32."""

    name: str
    difference: float  # of the two, relative to the sum
    limit: float
    change: float  # that the adapter makes to the weight, relative to the sum
    kept: float  # of that change, in what is written; 1 is all


# Rounding to nearest errs by at most u / sqrt(3) = 0.58 u in the mean square.
WEIGHT_MARGIN = 0.7


def rounded_weight(name: str, base: Tensor, merged: Tensor, written: Tensor) -> RoundedWeight:
    """Compare a weight in fp32 before and after the merge with its written form."""
    size = energy = lost = held = 0.0
    parts = (one.reshape(-1).split(_ELEMENTS) for one in (base, merged, written))
    for before, after, made in zip(*parts, strict=True):
        exact, rounded = after.double(), made.double()
        wanted = exact - before
        size += float(exact.square().sum())
        energy += float(wanted.square().sum())
        lost += float((exact - rounded).square().sum())
        held += float((wanted * (rounded - before)).sum())
    size = size or 1.0
    return RoundedWeight(
        name=name,
        difference=(lost / size) ** 0.5,
        limit=WEIGHT_MARGIN * unit_roundoff(written.dtype) + SUMS,
        change=(energy / size) ** 0.5,
        kept=held / energy if energy else 1.0,
    )


def compared_layers(weights: Sequence[RoundedWeight]) -> ComparedLayers | None:
    """Report the loss of writing merged weights in their dtype; None where none was compared.

    Weights count by the change that the adapter makes to them.
    """
    if not weights:
        return None
    worst = max(weights, key=lambda weight: weight.difference / weight.limit)
    total = sum(weight.change**2 for weight in weights)
    held = sum(weight.kept * weight.change**2 for weight in weights)
    return ComparedLayers(
        count=len(weights),
        worst=worst.name,
        difference=worst.difference,
        limit=worst.limit,
        kept=held / total if total else 1.0,
    )
