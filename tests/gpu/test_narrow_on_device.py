"""On a GPU optimizer states of 8 bits and bf16 have the bits of the host's."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from fluxtrain.optim import fused_narrow, reference
from fluxtrain.optim.hyper import Hyper
from fluxtrain.optim.narrow_adamw import update8_, update16_
from fluxtrain.optim.reference import States8, rounding
from fluxtrain.optim.split_adamw import encode
from fluxtrain.stream.engine import engine_of
from tests.wrap_with import wrap_with

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
    return reference.quiet(
        torch.where(torch.rand(n, generator=generator) < 0.05, bits.view(torch.float32), x)
    )


def assert_same_bits(host: list[Tensor | None], device: list[Tensor | None]) -> None:
    for one, other in zip(host, device, strict=True):
        if one is not None and other is not None:
            assert torch.equal(one.cpu().view(torch.uint8), other.cpu().view(torch.uint8))


def made(kind: str, n: int, split: bool) -> list[Tensor | None]:
    weights, lo = encode(any_floats(n, 1)) if split else (any_floats(n, 1), None)
    dtype = torch.uint8 if kind == "8bit" else torch.bfloat16
    scales = [torch.zeros(-(-n // 256)) for _ in range(2)] if kind == "8bit" else []
    return [weights, lo, torch.zeros(n, dtype=dtype), torch.zeros(n, dtype=dtype), *scales]


@LAYOUTS
@pytest.mark.parametrize("kind", ["8bit", "bf16"])
@pytest.mark.parametrize("n", [1, 255, 256, 1025, 1_000_003])
def test_the_update_on_the_gpu_has_the_hosts_bits(
    kind: str, n: int, split: bool, grad_dtype: torch.dtype
) -> None:
    assert fused_narrow.triton is not None, "a CUDA build of torch brings Triton"
    host: Any = made(kind, n, split)
    device: Any = [None if x is None else x.cuda() for x in host]
    one = torch.ones((), device="cuda")
    for step in range(1, 6):
        grad = any_floats(n, 10 + step).to(grad_dtype)
        options: Any = {"hyper": HYPER, "step": step}
        if kind == "8bit":
            update8_(*host[:2], States8(*host[2:]), grad, grad_scale=0.3, **options)
            fused_narrow.update8_resident_(
                *device[:2], States8(*device[2:]), grad.cuda(), scale=0.3, clip=one, **options
            )
        else:
            key = rounding(7, step, 4096)
            update16_(*host, grad, key, grad_scale=0.3, **options)
            fused_narrow.update16_resident_(
                *device, grad.cuda(), key, scale=0.3, clip=one, **options
            )
        assert_same_bits(host, device)


@pytest.mark.parametrize("kind", ["8bit", "bf16"])
def test_a_norm_that_is_not_finite_changes_nothing(kind: str) -> None:
    device: Any = [None if x is None else x.cuda() for x in made(kind, 1000, True)]
    before = copy.deepcopy(device)
    grad, clip = torch.ones(1000, device="cuda"), torch.tensor(math.nan, device="cuda")
    options: Any = {"hyper": HYPER, "step": 1, "scale": 1.0, "clip": clip}
    if kind == "8bit":
        fused_narrow.update8_resident_(*device[:2], States8(*device[2:]), grad, **options)
    else:
        fused_narrow.update16_resident_(*device, grad, rounding(0, 1, 0), **options)
    assert_same_bits(before, device)


@pytest.mark.parametrize("states", ["8bit", "bf16"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_every_placement_trains_to_the_same_bits(states: Any, dtype: torch.dtype) -> None:
    config = LlamaConfig(
        vocab_size=512, hidden_size=128, intermediate_size=256, num_hidden_layers=4,
        num_attention_heads=4, num_key_value_heads=2,
    )  # fmt: skip
    results = []
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        for options in (
            {"offload": "none"},
            {"offload": "weights", "device_groups": 0},
            {"offload": "weights", "device_groups": 3, "resident_blocks": 1},
        ):
            torch.manual_seed(0)
            model = LlamaForCausalLM(config).to(dtype)
            wrap_with(model, device="cuda", chunk_rows=2, states=states, **options)  # type: ignore[arg-type]
            formats = {s.format for g in engine_of(model).groups for s in g.trained}
            assert formats == {states, "fp32"}
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
            for step in range(5):
                torch.manual_seed(step)
                ids = torch.randint(0, 512, (4, 32))
                model(input_ids=ids, labels=ids).loss.backward()
                engine_of(model).clip_grad_norm(0.3)
                optimizer.step()
                optimizer.zero_grad()
            engine_of(model).flush()
            results.append([p.detach().cpu().clone() for p in model.parameters()])
    finally:
        torch.use_deterministic_algorithms(False)
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))
