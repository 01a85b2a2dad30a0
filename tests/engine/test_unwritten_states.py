"""States that were never written are written before the first update reads them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fluxtrain
from fluxtrain.core.adamw.flat import Flat
from fluxtrain.core.updates import updates
from tests.engine.pages import made_bytes


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(512, 512, bias=False)  # whose states are whole pages

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x)
        return y


@pytest.mark.parametrize("deferred", [False, True])
@pytest.mark.parametrize("offload", ["none", "weights"])
def test_the_first_update_reads_pages_of_its_own(
    offload: str, deferred: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And not the one page of zeros that Linux gives whoever reads first."""
    seen: list[int] = []

    def watched(owner: Any, name: str) -> None:
        step = getattr(owner, name)

        def after_a_look(flat: Flat, *args: Any, **how: Any) -> None:
            seen.append(made_bytes(flat.m) + made_bytes(flat.v) - flat.m.nbytes - flat.v.nbytes)
            step(flat, *args, **how)

        monkeypatch.setattr(owner, name, after_a_look)

    watched(updates, "step_")
    layers = nn.Sequential(*(Layer() for _ in range(3)))
    model = fluxtrain.wrap(layers, offload=offload, deferred_moments=deferred)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(4, 512)).sum().backward()
    optimizer.step()
    fluxtrain.sync(model)
    assert seen and not any(seen)
