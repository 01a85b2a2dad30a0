"""On a GPU the device update has the bits of the host's."""

from __future__ import annotations

import pytest
import torch

from fluxtrain.optim.hyper import Hyper
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
