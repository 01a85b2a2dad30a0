"""A block that works on the whole batch when it is told to is not cut then."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fluxtrain

WIDTH = 8


class Centred(nn.Module):
    """Takes the batch's mean away, or gives a mean beside, where that is asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: Tensor, *, centre: bool = False, gives: str = "hidden") -> Any:
        found = torch.tanh(self.linear(hidden))
        if centre:
            found = found - found.mean(0)
        return (found, found.square().mean()) if gives == "mean" else found


class Chosen(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.layers = nn.ModuleList(Centred() for _ in range(3))

    def forward(self, hidden: Tensor, **choices: Any) -> Tensor:
        beside: Any = 0.0
        for layer in self.layers:
            hidden = layer(hidden, **choices)
            if isinstance(hidden, tuple):
                hidden, more = hidden
                beside = beside + more
        return hidden.square().mean() + beside


@pytest.mark.parametrize("choice", [{"centre": True}, {"gives": "mean"}], ids=str)
def test_a_choice_that_comes_later_is_tried_before_a_block_is_cut(choice: dict[str, Any]) -> None:
    plain, wrapped = Chosen(), fluxtrain.wrap(Chosen(), device="cpu", chunk_rows=1)
    batch = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(1))
    given: dict[str, Any] = {"centre": False, "gives": "hidden"}
    for step in (given, {**given, **choice}, given):
        for model in (plain, wrapped):
            model.zero_grad()
            model(batch, **step).backward()
        for name, parameter in plain.named_parameters():
            got = wrapped.get_parameter(name).grad
            torch.testing.assert_close(got, parameter.grad, rtol=1e-5, atol=1e-7, msg=name)
    fluxtrain.unwrap(wrapped)
