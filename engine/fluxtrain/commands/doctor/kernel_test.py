"""Test the native kernels of each instruction set against scalar ones, and that against torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor

from fluxtrain import _native
from fluxtrain.commands.doctor.same import Mismatch, same_bits
from fluxtrain.core.adamw.dynamic_map import BLOCK
from fluxtrain.core.adamw.flat import Flat
from fluxtrain.core.adamw.hyper import AdamWUpdate, Hyper
from fluxtrain.core.adamw.kernels import Backend, accumulate_, step_, sum_squares
from fluxtrain.core.adamw.reference import encode, rounding
from fluxtrain.core.quantization import reference
from fluxtrain.core.quantization.layout import PackedLayout
from fluxtrain.core.quantization.packing import pack, unpack
from fluxtrain.plan.states import PACKED_FORMATS, STATE_FORMATS, StateFormat

ELEMENTS = 100_003  # several threads, and a tail that fills no vector
HYPER = Hyper(lr=1e-3, weight_decay=0.1)
_LAYOUTS = ((True, torch.bfloat16), (True, torch.float32), (False, torch.float32))
_ODD = (0.0, -0.0, math.inf, -math.inf, math.nan, 1e-42, -1e-42, 3e38, 1e-20)


def check_kernels() -> str:
    """Run all the kernels on values that include zeros, infinities, NaN and subnormals."""
    with _any_isa() as available:
        results = {}
        for name in available:
            _native.set_isa(name)
            results[name] = _updates("native") | _sums() | _packed(pack, unpack)
    scalar = results.pop("scalar")
    count = sum(tensor.numel() for tensor in scalar.values())
    for name, found in results.items():
        try:
            same_bits(scalar, found)
        except Mismatch as mismatch:
            raise Mismatch(f"{name} against scalar: {mismatch}") from mismatch
    by_torch = _updates("torch") | _packed(reference.pack, reference.unpack)
    try:
        same_bits({name: scalar[name] for name in by_torch}, by_torch)
    except Mismatch as mismatch:
        raise Mismatch(f"scalar against torch: {mismatch}") from mismatch
    names = ", ".join([*results, "torch"])
    return f"{names} equal scalar in {count:,} values"


def _updates(backend: Backend) -> dict[str, Tensor]:
    """Return what three steps leave behind, by format of weights, states and gradients."""
    found: dict[str, Tensor] = {}
    for states in STATE_FORMATS:
        for split, grad_dtype in _LAYOUTS:
            weights, grad, m, v = _values()
            flat = _flat(weights, m, v, states, split=split)
            for step in (1, 2, 3):
                flat = replace(
                    flat, gradient=(grad * step).to(grad_dtype), rounding=rounding(0, step, 0)
                )
                step_(flat, AdamWUpdate(hyper=HYPER, step=step, scale=0.5), backend=backend)
            left = {name: x for name, x in vars(flat).items() if isinstance(x, Tensor)}
            kind = f"{'split' if split else 'fp32'} weights, {states} states, {grad_dtype}"
            found |= {f"adamw {kind}: {name}": x for name, x in left.items()}
    return found


def _flat(weights: Tensor, m: Tensor, v: Tensor, states: StateFormat, *, split: bool) -> Flat:
    """Return these weights and moments; 8-bit moments begin at zero."""
    hi, lo = encode(weights) if split else (weights, None)
    if states == "8bit":
        codes = [torch.zeros(ELEMENTS, dtype=torch.uint8) for _ in range(2)]
        scales = [torch.zeros(-(-ELEMENTS // BLOCK)) for _ in range(2)]
        return Flat(
            weights=hi, lo=lo, m=codes[0], v=codes[1], m_scale=scales[0], v_scale=scales[1],
            gradient=weights,
        )  # fmt: skip
    dtype = torch.float32 if states == "fp32" else torch.bfloat16
    return Flat(weights=hi, lo=lo, m=m.to(dtype), v=v.to(dtype), gradient=weights)


def _sums() -> dict[str, Tensor]:
    weights, grad, _, _ = _values()
    grad = torch.nan_to_num(grad, posinf=1.0, neginf=-1.0)  # one NaN would make the whole sum NaN
    halves = grad.bfloat16()
    for x in (grad, halves):
        accumulate_(weights, x)
    squares = [sum_squares(grad), sum_squares(halves)]
    return {"accumulate": weights, "sum of squares": torch.tensor(squares, dtype=torch.float64)}


def _packed(
    packs: Callable[[PackedLayout, int, Tensor, Tensor], None],
    unpacks: Callable[[PackedLayout, Tensor, Tensor], None],
) -> dict[str, Tensor]:
    """Return what finite weights become in each packed format, and what those become again."""
    weights = torch.nan_to_num(_values()[0]).view(1, -1)
    found: dict[str, Tensor] = {}
    for format in PACKED_FORMATS:
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            weight = weights.clamp(-6e4, 6e4).to(dtype)
            layout = PackedLayout.of(format, [weight.shape])
            packed = torch.zeros(layout.size_bytes, dtype=torch.uint8)
            dense = torch.zeros(layout.elements, dtype=dtype)
            packs(layout, 0, weight, packed)
            unpacks(layout, packed, dense)
            found |= {f"packed as {format}, {dtype}": packed, f"{format} as {dtype}": dense}
    return found


def _values() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Make fp32 weights, gradients, m and v, the same each time."""
    generator = torch.Generator().manual_seed(0)
    weights, grad, m = (torch.randn(ELEMENTS, generator=generator) for _ in range(3))
    odd = torch.tensor(_ODD)
    weights[: len(odd)] = odd
    grad[len(odd) : 2 * len(odd)] = odd
    return weights, grad * 1e-2, m * 1e-3, (m * 1e-3).square()


@contextmanager
def _any_isa() -> Iterator[list[str]]:
    """Give the instruction sets that the processor and FLUXTRAIN_ISA allow; restore the set in use
    afterwards."""
    before = _native.isa()
    try:
        yield [name for name in _native.ISA_NAMES if _native.set_isa(name) == name]
    finally:
        _native.set_isa(before)
