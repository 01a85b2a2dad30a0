"""Blocks on the device stand between those at home: copies start ahead of them, bits stay."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from fluxtrain.core.wrap.engine import engine_of
from tests.wrap_with import wrap_with

LAYERS = 8
HOMES = "GGCGCGCC"  # of the blocks, with four of them on the device


def trained(model: nn.Module, batch: Any, in_backward: bool) -> list[float]:
    """Losses of three steps."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for seed in range(3):
        loss = model(**batch(seed=seed)).loss
        if in_backward:
            engine_of(model).begin_step_in_backward(optimizer)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def wrapped(tiny: Any, **place: Any) -> nn.Module:
    model = tiny("llama", torch.bfloat16, num_hidden_layers=LAYERS)
    return wrap_with(model, device="cpu", offload="max", **place)


@pytest.mark.parametrize("in_backward", [False, True])
@pytest.mark.parametrize("moments", [False, True])
@pytest.mark.thinned(2)
def test_training_has_the_bits_of_one_with_every_block_at_home(
    tiny: Any, batch: Any, same: Any, in_backward: bool, moments: bool
) -> None:
    plain = wrapped(tiny)
    between = wrapped(tiny, device_groups=4, device_first="blocks", deferred_moments=moments)
    assert trained(between, batch, in_backward) == trained(plain, batch, in_backward)
    assert engine_of(between).residency().optimizer == HOMES
    same(between.state_dict(), plain.state_dict())


def test_the_next_block_at_home_is_copied_while_those_on_the_device_before_it_are_computed(
    tiny: Any, batch: Any
) -> None:
    """With two slots one block is copied ahead: not the next, which needs no copy, but the next at
    home, wherever it stands."""
    model = wrapped(tiny, device_groups=4, device_first="blocks")
    engine = engine_of(model)
    blocks = [group for group in engine.groups if group.kind == "block"]
    trained(model, batch, in_backward=False)  # the engine learns who follows whom
    found: dict[int, list[int]] = {}

    def look(at: int) -> Any:
        def hook(*_: Any) -> None:
            held = [
                n
                for n, group in enumerate(blocks)
                if engine.cards[0].window.holds(group) is not None
            ]
            found.setdefault(at, [n for n in held if n > at])

        return hook

    layers = model.get_submodule("model.layers")
    for at, layer in enumerate(layers.children()):
        layer.register_forward_hook(look(at))
    model(**batch(seed=9)).loss.backward()
    following = {at: [n for n in (2, 4, 6, 7) if n > at][:1] for at in range(LAYERS)}
    assert found == following
