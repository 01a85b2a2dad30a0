"""TRL's fused loss multiplies by a streamed head's weight on the GPU, never on the CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import fluxtrain
from tests.engine.conftest import tiny_model
from tests.engine.test_outside_head import IDS, fuse, gradients_of

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("family", ["llama", "qwen2"])
@pytest.mark.parametrize("offload", ["weights", "max"])
def test_the_heads_weight_is_on_the_gpu(family: str, offload: str) -> None:
    seen: list[Any] = []
    model = fluxtrain.wrap(
        fuse(tiny_model(family, torch.bfloat16), seen), device="cuda", offload=offload
    )
    plain = fuse(tiny_model(family, torch.bfloat16).cuda())
    expected = {name: gradient.cpu() for name, gradient in _gradients(plain, IDS.cuda()).items()}
    found = gradients_of(model, fused_lm_head=True)
    assert seen[0].weight.is_cuda
    for name, gradient in found.items():
        off = (gradient.float().cpu() - expected[name].float()).norm()
        assert off <= 0.03 * expected[name].float().norm() + 1e-6, name
    fluxtrain.unwrap(model)


def _gradients(model: Any, ids: torch.Tensor) -> dict[str, torch.Tensor]:
    model(input_ids=ids, labels=ids, fused_lm_head=True).loss.backward()
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
