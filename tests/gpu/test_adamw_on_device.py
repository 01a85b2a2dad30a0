"""On a GPU the device update has the bits of the host's."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from fluxtrain.core.adamw.flat import Flat
from fluxtrain.core.adamw.hyper import AdamWUpdate, Hyper
from fluxtrain.core.adamw.kernels import backend_for, step_
from fluxtrain.core.adamw.reference import decode, encode

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("backend", ["triton", "torch"])
@pytest.mark.parametrize(
    ("split", "grad_dtype"),
    [(True, torch.bfloat16), (True, torch.float32), (False, torch.float32)],
)
def test_a_resident_block_is_updated_as_a_streamed_one(
    split: bool, grad_dtype: torch.dtype, backend: Any
) -> None:
    n, hyper = 1_000_003, Hyper(lr=1e-2, weight_decay=0.1)
    weights, lo = encode(torch.randn(n) * 0.05) if split else (torch.randn(n) * 0.05, None)
    host: dict[str, Any] = {"weights": weights, "lo": lo, "m": torch.zeros(n), "v": torch.zeros(n)}
    device = {name: None if x is None else x.cuda() for name, x in host.items()}
    clip = torch.tensor(0.5)
    for step in range(1, 6):
        grad = (torch.randn(n) * 10 ** (torch.rand(n) * 12 - 10)).to(grad_dtype)
        update = AdamWUpdate(hyper=hyper, step=step, scale=0.25, clip=clip)
        step_(Flat(**host, gradient=grad), update)
        there = Flat(**device, gradient=grad.cuda())
        assert backend_for(there) == "triton", "a CUDA build of torch brings Triton"
        step_(there, replace(update, clip=clip.cuda()), backend=backend)
        for name, one in host.items():
            assert one is None or torch.equal(one, device[name].cpu()), name


def test_split_masters_are_the_same_on_both_sides() -> None:
    bits = torch.randint(-(2**31), 2**31, (1 << 20,)).to(torch.int32)
    master = bits.view(torch.float32)
    for one, other in zip(encode(master), encode(master.cuda()), strict=True):
        assert torch.equal(one.view(torch.int16), other.cpu().view(torch.int16))
    hi, lo = encode(master)
    there = decode(hi.cuda(), lo.cuda()).cpu()
    assert torch.equal(decode(hi, lo).view(torch.int32), there.view(torch.int32))
