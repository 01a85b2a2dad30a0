"""Steps in backward of graphs that need weights more than once, and refused steps, on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fluxtrain.core.wrap.engine import engine_of
from tests.wrap_with import wrap_with

pytestmark = pytest.mark.gpu

Loss = Callable[[nn.Module, Tensor], Tensor]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(512, 512), nn.Linear(512, 512)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.b(torch.tanh(self.a(x)))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.blocks = nn.ModuleList(Block() for _ in range(8))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def distance(out: Tensor, x: Tensor) -> Tensor:
    return (out - x.flip(1)).float().square().mean()


def block_called_twice(model: nn.Module, x: Tensor) -> Tensor:
    return distance(model.blocks[1](model(x)), x)


def model_called_twice(model: nn.Module, x: Tensor) -> Tensor:
    return distance(model(x), x) + distance(model(x + 1), x)


def penalty_before(model: nn.Module, x: Tensor) -> Tensor:
    first = 1e-2 * model.blocks[2].a.weight.float().square().sum().to(x.device)
    return first + distance(model(x), x)


def wrapped(device_groups: int) -> tuple[nn.Module, Any, torch.optim.Optimizer]:
    model = wrap_with(
        Net().bfloat16(),
        device="cuda",
        offload="weights",
        overlap=True,
        device_groups=device_groups,
    )
    return model, engine_of(model), torch.optim.AdamW(model.parameters(), lr=1e-3)


def batch(seed: int) -> Tensor:
    draw = torch.Generator().manual_seed(seed)
    return torch.randn(64, 512, generator=draw).bfloat16().cuda()


@pytest.mark.parametrize("device_groups", [0, 3])
@pytest.mark.parametrize("loss_of", [block_called_twice, model_called_twice, penalty_before])
def test_steps_in_backward_equal_exact_ones(loss_of: Loss, device_groups: int) -> None:
    found = []
    for in_backward in (False, True):
        model, engine, optimizer = wrapped(device_groups)
        for step in range(6):
            loss = loss_of(model, batch(step))
            if in_backward:
                engine.begin_step_in_backward(optimizer, loss)
            loss.backward()
            engine.clip_grad_norm(None, [loss.detach()])
            optimizer.step()
            optimizer.zero_grad()
        engine.flush()
        assert {m.step for g in engine.groups for m in g.members} == {6}
        found.append({name: p.detach().cpu().clone() for name, p in model.named_parameters()})
    assert [name for name, w in found[0].items() if not torch.equal(w, found[1][name])] == []
