"""On a GPU the device update has the bits of the host's."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fluxtrain.optim import fused_device
from fluxtrain.optim.hyper import Hyper, Turns
from fluxtrain.optim.split_adamw import decode, encode, update_, update_on_device_

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("grad_dtype", [torch.bfloat16, torch.float32])
def test_a_resident_block_is_updated_as_a_streamed_one(grad_dtype: torch.dtype) -> None:
    n, hyper = 1_000_003, Hyper(lr=1e-2, weight_decay=0.1)
    host = [*encode(torch.randn(n) * 0.05), torch.zeros(n), torch.zeros(n)]
    device = [x.cuda() for x in host]
    for step in range(1, 6):
        grad = (torch.randn(n) * 10 ** (torch.rand(n) * 12 - 10)).to(grad_dtype)
        update_(*host, grad, hyper=hyper, step=step, grad_scale=0.3)
        update_on_device_(*device, grad.cuda(), hyper=hyper, step=step, grad_scale=0.3)
        for one, other in zip(host, device, strict=True):
            assert torch.equal(one, other.cpu())


def test_split_masters_are_the_same_on_both_sides() -> None:
    bits = torch.randint(-(2**31), 2**31, (1 << 20,)).to(torch.int32)
    master = bits.view(torch.float32)
    for one, other in zip(encode(master), encode(master.cuda()), strict=True):
        assert torch.equal(one.view(torch.int16), other.cpu().view(torch.int16))
    hi, lo = encode(master)
    there = decode(hi.cuda(), lo.cuda()).cpu()
    assert torch.equal(decode(hi, lo).view(torch.int32), there.view(torch.int32))


@pytest.mark.parametrize(
    "borders", [(64,), (64, 128, 1024, 1025, 3000, 100_032, 999_999), tuple(range(64, 1088, 64))]
)
@pytest.mark.parametrize("split", [True, False])
def test_parts_that_take_turns_in_one_launch_have_the_hosts_bits(
    borders: tuple[int, ...], split: bool
) -> None:
    assert fused_device.triton is not None, "a CUDA build of torch brings Triton"
    n, decayed = 1_000_003, Hyper(lr=1e-2, weight_decay=0.1)
    weights, lo = encode(torch.randn(n) * 0.05) if split else (torch.randn(n) * 0.05, None)
    host: list[Any] = [weights, lo, torch.zeros(n), torch.zeros(n)]
    device = [None if x is None else x.cuda() for x in host]
    for step in range(1, 4):
        gradient = torch.randn(n) * 10 ** (torch.rand(n) * 12 - 10)
        for flats, clip in ((host, torch.tensor(0.5)), (device, torch.tensor(0.5, device="cuda"))):
            fused_device.update_resident_(
                *flats, gradient.to(clip.device),
                hyper=decayed, step=step, scale=0.3, clip=clip, turns=Turns(borders, 0.0),
            )  # fmt: skip
    for one, other in zip(host, device, strict=True):
        assert one is None or torch.equal(one, other.cpu())
