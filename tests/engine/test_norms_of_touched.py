"""The engine's own norm where the user has dropped some gradients and set others."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from fluxtrain.core.wrap.engine import engine_of
from tests.engine.plain_models import Net
from tests.wrap_with import wrap_with

Touch = Callable[[nn.Module], None]


def drops_one_and_sets_another(block: nn.Module) -> None:
    block.unused.weight.grad = torch.full_like(block.unused.weight, 9.0)
    block.a.weight.grad = None


def looks_at_one_and_drops_it(block: nn.Module) -> None:
    assert block.a.weight.grad is not None
    block.a.weight.grad.add_(0.0)
    block.a.weight.grad = None


def writes_one(block: nn.Module) -> None:
    assert block.b.weight.grad is not None
    block.b.weight.grad.fill_(2.0)


def drops_all(block: nn.Module) -> None:
    for parameter in block.parameters():
        parameter.grad = None


def scales_one(block: nn.Module) -> None:
    assert block.a.bias.grad is not None
    block.a.bias.grad.mul_(50.0)


@pytest.mark.parametrize("device_groups", [0, 2])
@pytest.mark.parametrize(
    "touch",
    [drops_one_and_sets_another, looks_at_one_and_drops_it, writes_one, drops_all, scales_one],
)
def test_the_norm_is_that_of_the_gradients_there_are(touch: Touch, device_groups: int) -> None:
    torch.manual_seed(3)
    model = wrap_with(
        Net(), device="cpu", offload="weights", overlap=True, device_groups=device_groups
    )
    x = torch.randn(8, 96)
    (model(x) - x.flip(1)).square().mean().backward()
    touch(model.blocks[1])
    found = engine_of(model).clip_grad_norm(None).value()
    each = [p.grad.detach().norm() for p in model.parameters() if p.grad is not None]
    assert found == pytest.approx(float(torch.stack(each).norm()), rel=1e-6)
