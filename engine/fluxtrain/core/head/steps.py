"""What a model does with its logits between the head and the loss, one element at a time.

Soft caps (Gemma), scales (Cohere, Granite), casts and a constant for each word (BART) are kept as
`Step`s and applied to each chunk of logits, so that no whole logits are made for them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

_SCALED = (
    *(Tensor.mul, Tensor.__mul__, Tensor.__rmul__, torch.mul),
    *(Tensor.div, Tensor.__truediv__, torch.div),
)
_SHIFTED = (Tensor.add, Tensor.__add__, Tensor.__radd__, torch.add)
_ALONE = (Tensor.tanh, torch.tanh)
_COPIES = 4  # of a chunk's logits that its steps may hold at a time


@dataclass(frozen=True, eq=False)
class Step:
    """An operation on logits (..., V) that keeps their shape, with its other operand if it has
    one: a number, a 0-d tensor, or a constant for each token (V,)."""

    func: Callable[..., Tensor]
    others: tuple[Any, ...] = ()

    def apply(self, logits: Tensor, columns: slice) -> Tensor:
        """Apply the step to logits (..., w) of the tokens `columns`."""
        return self.func(logits, *(_cut(other, columns) for other in self.others))


Steps = tuple[Step, ...]


def step_of(func: Callable[..., Any], rest: tuple[Any, ...], vocabulary: int) -> Step | None:
    """Return the step equivalent to a call of `func` on logits with `rest`; None for any other
    call."""
    if func in _ALONE and not rest:
        return Step(func)
    if len(rest) != 1:
        return None
    (other,) = rest
    if func in _SCALED and (_is_number(other) or _is_constant(other, 1)):
        return Step(func, rest)
    if func in _SHIFTED and _is_constant(other, vocabulary):
        return Step(func, (other.detach().reshape(-1),))
    return None


def cast(dtype: torch.dtype) -> Step:
    """Return the step that casts logits."""
    return Step(Tensor.to, (dtype,))


def after(steps: Steps, logits: Tensor, columns: slice = slice(None)) -> Tensor:
    """Apply steps to logits (..., w) of the tokens `columns`."""
    for step in steps:
        logits = step.apply(logits, columns)
    return logits


def pull_back(
    steps: Steps, logits: Tensor, gradient: Tensor, columns: slice = slice(None)
) -> Tensor:
    """Compute the gradient of logits (..., w) from the gradient after the steps."""
    if not steps:
        return gradient
    leaf = logits.detach().requires_grad_()
    with torch.enable_grad():
        out = after(steps, leaf, columns)
    (found,) = torch.autograd.grad(out, leaf, gradient.to(out.dtype))
    return found


def copies_of(steps: Steps) -> int:
    """Return how many copies of a chunk's logits exist at a time."""
    return _COPIES if steps else 1


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_constant(value: Any, numel: int) -> bool:
    if not isinstance(value, Tensor) or value.requires_grad or value.numel() != numel:
        return False
    return value.dim() == 0 if numel == 1 else value.shape[-1] == numel


def _cut(other: Any, columns: slice) -> Any:
    return other[columns] if isinstance(other, Tensor) and other.dim() else other
