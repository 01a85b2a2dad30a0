"""AdamW's states of every format, updated by whatever is tested, and odd numbers for them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from fluxtrain import _native
from fluxtrain._native import Pass
from fluxtrain.core.adamw import fp32, reference
from fluxtrain.core.adamw.dynamic_map import BLOCK
from fluxtrain.core.adamw.flat import Flat
from fluxtrain.core.adamw.hyper import AdamWUpdate, Hyper, coefficients
from fluxtrain.core.adamw.kernels import step_, step_by_torch_
from fluxtrain.core.adamw.reference import Rounding, States8, decode, encode, rounding

ISAS = pytest.mark.parametrize("isa", _native.ISA_NAMES)
SIGNS = pytest.mark.parametrize("signed", [True, False])
KINDS = pytest.mark.parametrize("kind", ["8bit", "bf16", "fp32"])
LAYOUTS = pytest.mark.parametrize(
    "layout", [("split", torch.bfloat16), ("split", torch.float32), ("fp32", torch.float32)]
)
HYPER = Hyper(lr=1e-2, weight_decay=0.1)


def any_floats(n: int, seed: int, wild: bool) -> Tensor:
    """Ordinary values; when wild, a third of them any bit pattern: Inf, NaN, subnormal, huge."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, generator=generator) * 0.05
    if wild:
        bits = torch.randint(-(2**31), 2**31, (n,), generator=generator).to(torch.int32)
        x = torch.where(torch.rand(n, generator=generator) < 0.33, bits.view(torch.float32), x)
        x[torch.rand(n, generator=generator) < 0.1] = 0.0
    return fp32.quiet(x)


def same_bits(got: Tensor, expected: Tensor) -> bool:
    width = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[got.element_size()]
    return torch.equal(got.view(width), expected.view(width))


class Held:
    """Weights and states of `n` elements, updated in place by whatever is under test."""

    def __init__(self, kind: str, layout: str, n: int, seed: int, wild: bool = False) -> None:
        self.kind, self.n = kind, n
        master = any_floats(n, seed, wild)
        self.weights, self.lo = encode(master) if layout == "split" else (master, None)
        blocks = -(-n // BLOCK)
        dtype = torch.uint8 if kind == "8bit" else torch.bfloat16
        scales = (torch.zeros(blocks), torch.zeros(blocks)) if kind == "8bit" else ()
        self.states: Any = (torch.zeros(n, dtype=dtype), torch.zeros(n, dtype=dtype), *scales)
        if kind == "fp32":
            m, v = (any_floats(n, seed + more, wild) for more in (1, 2))
            self.states = (m, v.square())

    def copy(self) -> Held:
        other = object.__new__(Held)
        other.__dict__ = {
            key: value.clone() if isinstance(value, Tensor) else value
            for key, value in vars(self).items()
        }
        other.states = tuple(state.clone() for state in self.states)
        return other

    def step(
        self,
        grad: Tensor,
        step: int,
        scale: float = 1.0,
        *,
        cut: slice | None = None,
        by_torch: bool = False,
        part: Pass = Pass.UPDATE,
        threads: int | None = 1,
        slice_elements: int = 512,
    ) -> None:
        """One update of the whole, or of the elements in `cut`."""
        flat = self.flat(grad, rounding(7, step, 0))
        if cut is not None:
            flat = flat.cut(cut.start, cut.stop)
        update = AdamWUpdate(hyper=HYPER, step=step, scale=scale)
        if by_torch:
            step_by_torch_(flat, update, slice_elements=slice_elements)
        else:
            step_(flat, update, part=part, threads=threads)

    def flat(self, grad: Tensor, key: Rounding) -> Flat:
        """These weights and states beside a gradient."""
        names = ("m", "v", "m_scale", "v_scale")[: len(self.states)]
        return Flat(
            weights=self.weights, lo=self.lo, gradient=grad, rounding=key,
            **dict(zip(names, self.states, strict=True)),
        )  # fmt: skip

    def oracle_step(self, grad: Tensor, step: int, scale: float = 1.0) -> None:
        """The same by the oracle, out of place."""
        c = coefficients(HYPER, step, scale)
        master = self.weights if self.lo is None else decode(self.weights, self.lo)
        if self.kind == "8bit":
            master, self.states = reference.adamw8(master, States8(*self.states), grad, c)
        elif self.kind == "bf16":
            m, v = self.states
            master, *states = reference.adamw16(master, m, v, grad, c, rounding(7, step, 0))
            self.states = tuple(states)
        else:
            m, v = self.states
            master, *states = reference.adamw(master, m, v, grad, c)
            self.states = tuple(states)
        self.weights, self.lo = (master, None) if self.lo is None else encode(master)

    def equals(self, other: Held) -> bool:
        mine, theirs = [self.weights, *self.states], [other.weights, *other.states]
        if self.lo is not None and other.lo is not None:
            mine, theirs = [*mine, self.lo], [*theirs, other.lo]
        return all(same_bits(a, b) for a, b in zip(mine, theirs, strict=True))
