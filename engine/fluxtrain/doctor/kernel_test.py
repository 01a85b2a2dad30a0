"""Every instruction set of the native kernels against the scalar one, and that against torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from fluxtrain import _native
from fluxtrain.doctor.same import Mismatch, same_bits
from fluxtrain.optim.dynamic_map import BLOCK
from fluxtrain.optim.hyper import Hyper
from fluxtrain.optim.narrow_adamw import update8_, update8_by_torch_, update16_, update16_by_torch_
from fluxtrain.optim.reference import States8, rounding
from fluxtrain.optim.split_adamw import (
    accumulate_,
    encode,
    sum_squares,
    update_,
    update_by_torch_,
    update_f32_,
)

ELEMENTS = 100_003  # several threads, and a tail that fills no vector
HYPER = Hyper(lr=1e-3, weight_decay=0.1)
_ODD = (0.0, -0.0, math.inf, -math.inf, math.nan, 1e-42, -1e-42, 3e38, 1e-20)

Update = Callable[..., None]


def check_kernels() -> str:
    """All the kernels on values that include zeros, infinities, NaN and subnormals."""
    with _any_isa() as available:
        results = {}
        for name in available:
            _native.set_isa(name)
            results[name] = _results(update_, update_f32_) | _narrow(update8_, update16_) | _sums()
    scalar = results.pop("scalar")
    count = sum(tensor.numel() for tensor in scalar.values())
    for name, found in results.items():
        try:
            same_bits(scalar, found)
        except Mismatch as mismatch:
            raise Mismatch(f"{name} against scalar: {mismatch}") from mismatch
    by_torch = _results(update_by_torch_, _update_f32_by_torch)
    by_torch |= _narrow(update8_by_torch_, update16_by_torch_)
    try:
        same_bits({name: scalar[name] for name in by_torch}, by_torch)
    except Mismatch as mismatch:
        raise Mismatch(f"scalar against torch: {mismatch}") from mismatch
    names = ", ".join([*results, "torch"])
    return f"{names} equal scalar in {count:,} values"


def _results(update: Update, update_f32: Update) -> dict[str, Tensor]:
    """What three steps of each AdamW kernel leave behind."""
    found: dict[str, Tensor] = {}
    for grad_dtype in (torch.bfloat16, torch.float32):
        weights, grad, m, v = _values()
        hi, lo = encode(weights)
        for step in (1, 2, 3):
            scaled = (grad * step).to(grad_dtype)
            update(hi, lo, m, v, scaled, hyper=HYPER, step=step, grad_scale=0.5)
        kind = str(grad_dtype).removeprefix("torch.")
        found |= {f"adamw split {kind} {n}": t for n, t in zip("hlmv", (hi, lo, m, v), strict=True)}
    weights, grad, m, v = _values()
    for step in (1, 2, 3):
        update_f32(weights, m, v, grad, hyper=HYPER, step=step)
    return found | {"adamw f32 p": weights, "adamw f32 m": m, "adamw f32 v": v}


def _narrow(update8: Update, update16: Update) -> dict[str, Tensor]:
    """The same with states of 8 bits and of bf16."""
    weights, grad, _, _ = _values()
    hi, lo = encode(weights)
    codes = [torch.zeros(ELEMENTS, dtype=torch.uint8) for _ in range(2)]
    scales = [torch.zeros(-(-ELEMENTS // BLOCK)) for _ in range(2)]
    hi16, lo16 = encode(weights)
    m, v = (torch.zeros(ELEMENTS, dtype=torch.bfloat16) for _ in range(2))
    for step in (1, 2, 3):
        halves = (grad * step).bfloat16()
        update8(hi, lo, States8(*codes, *scales), halves, hyper=HYPER, step=step)
        update16(hi16, lo16, m, v, halves, rounding(0, step, 0), hyper=HYPER, step=step)
    left = {"h": hi, "l": lo, "m": codes[0], "v": codes[1], "m scales": scales[0],
            "v scales": scales[1]}  # fmt: skip
    found = {f"adamw 8-bit {name}": tensor for name, tensor in left.items()}
    rounded = zip("hlmv", (hi16, lo16, m, v), strict=True)
    return found | {f"adamw bf16 states {name}": tensor for name, tensor in rounded}


def _update_f32_by_torch(
    p: Tensor, m: Tensor, v: Tensor, grad: Tensor, *, hyper: Hyper, step: int
) -> None:
    update_by_torch_(p, None, m, v, grad, hyper=hyper, step=step)


def _sums() -> dict[str, Tensor]:
    weights, grad, _, _ = _values()
    grad = torch.nan_to_num(grad, posinf=1.0, neginf=-1.0)  # one NaN would be the whole sum
    halves = grad.bfloat16()
    for x in (grad, halves):
        accumulate_(weights, x)
    squares = [sum_squares(grad), sum_squares(halves)]
    return {"accumulate": weights, "sum of squares": torch.tensor(squares, dtype=torch.float64)}


def _values() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(weights, gradients, m, v), fp32, the same each time."""
    generator = torch.Generator().manual_seed(0)
    weights, grad, m = (torch.randn(ELEMENTS, generator=generator) for _ in range(3))
    odd = torch.tensor(_ODD)
    weights[: len(odd)] = odd
    grad[len(odd) : 2 * len(odd)] = odd
    return weights, grad * 1e-2, m * 1e-3, (m * 1e-3).square()


@contextmanager
def _any_isa() -> Iterator[list[str]]:
    """The sets that the processor and FLUXTRAIN_ISA allow; the one in use comes back after."""
    before = _native.isa()
    try:
        yield [name for name in _native.ISA_NAMES if _native.set_isa(name) == name]
    finally:
        _native.set_isa(before)
