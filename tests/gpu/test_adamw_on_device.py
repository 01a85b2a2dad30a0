"""On a GPU the update has the bits of the host's, with states in fp32, bf16 and 8 bits."""

from __future__ import annotations

import copy
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from fluxtrain.core.adamw.flat import Flat
from fluxtrain.core.adamw.fp32 import quiet
from fluxtrain.core.adamw.hyper import AdamWUpdate, Hyper
from fluxtrain.core.adamw.kernels import backend_for, step_
from fluxtrain.core.adamw.reference import decode, encode, rounding

pytestmark = pytest.mark.gpu
HYPER = Hyper(lr=1e-2, weight_decay=0.1)
LAYOUTS = pytest.mark.parametrize(
    ("split", "grad_dtype"),
    [(True, torch.bfloat16), (True, torch.float32), (False, torch.float32)],
)


def any_floats(n: int, seed: int) -> Tensor:
    """Twelve orders of magnitude, and one in twenty any bit pattern."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, generator=generator) * 10 ** (torch.rand(n, generator=generator) * 12 - 11)
    bits = torch.randint(-(2**31), 2**31, (n,), generator=generator).to(torch.int32)
    return quiet(
        torch.where(torch.rand(n, generator=generator) < 0.05, bits.view(torch.float32), x)
    )


def assert_same_bits(host: list[Tensor | None], device: list[Tensor | None]) -> None:
    for one, other in zip(host, device, strict=True):
        if one is not None and other is not None:
            assert torch.equal(one.cpu().view(torch.uint8), other.cpu().view(torch.uint8))


def made(kind: str, n: int, split: bool, device: str = "cpu") -> Flat:
    weights, lo = encode(any_floats(n, 1)) if split else (any_floats(n, 1), None)
    dtype = {"8bit": torch.uint8, "bf16": torch.bfloat16, "fp32": torch.float32}[kind]
    scales = [torch.zeros(-(-n // 256)).to(device) if kind == "8bit" else None for _ in range(2)]
    return Flat(
        weights=weights.to(device), lo=None if lo is None else lo.to(device),
        m=torch.zeros(n, dtype=dtype).to(device), v=torch.zeros(n, dtype=dtype).to(device),
        m_scale=scales[0], v_scale=scales[1], gradient=weights.to(device),
        rounding=rounding(7, 0, 4096),
    )  # fmt: skip


def tensors(flat: Flat) -> list[Tensor | None]:
    """What a step writes."""
    return [flat.weights, flat.lo, flat.m, flat.v, flat.m_scale, flat.v_scale]


@LAYOUTS
@pytest.mark.parametrize("kind", ["8bit", "bf16", "fp32"])
@pytest.mark.parametrize(
    ("n", "backend"),
    [(1, "triton"), (255, "triton"), (256, "triton"), (1_000_003, "triton"), (1_000_003, "torch")],
)
def test_the_update_on_the_gpu_has_the_hosts_bits(
    kind: str, n: int, backend: Any, split: bool, grad_dtype: torch.dtype
) -> None:
    host, device = made(kind, n, split), made(kind, n, split, "cuda")
    assert backend_for(device) == "triton", "a CUDA build of torch brings Triton"
    for step in range(1, 6):
        grad, key = any_floats(n, 10 + step).to(grad_dtype), rounding(7, step, 4096)
        clip = torch.tensor(0.5)
        update = AdamWUpdate(hyper=HYPER, step=step, scale=0.3, clip=clip)
        step_(replace(host, gradient=grad, rounding=key), update)
        there = replace(device, gradient=grad.cuda(), rounding=key)
        step_(there, replace(update, clip=clip.cuda()), backend=backend)
        assert_same_bits(tensors(host), tensors(device))


def test_split_masters_are_the_same_on_both_sides() -> None:
    bits = torch.randint(-(2**31), 2**31, (1 << 20,)).to(torch.int32)
    master = bits.view(torch.float32)
    for one, other in zip(encode(master), encode(master.cuda()), strict=True):
        assert torch.equal(one.view(torch.int16), other.cpu().view(torch.int16))
    hi, lo = encode(master)
    there = decode(hi.cuda(), lo.cuda()).cpu()
    assert torch.equal(decode(hi, lo).view(torch.int32), there.view(torch.int32))


@pytest.mark.parametrize("kind", ["8bit", "bf16"])
def test_a_norm_that_is_not_finite_changes_nothing(kind: str) -> None:
    flat = replace(made(kind, 1000, True, "cuda"), gradient=torch.ones(1000, device="cuda"))
    before = copy.deepcopy(tensors(flat))
    clip = torch.tensor(math.nan, device="cuda")
    step_(flat, AdamWUpdate(hyper=HYPER, step=1, clip=clip))
    assert_same_bits(before, tensors(flat))
