"""Steps of models whose weights are fp16, and what such a training changes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fluxtrain.core.memory.segment import Member
from fluxtrain.core.updates.loss_scale import FIRST, LossScale
from fluxtrain.core.wrap.engine import Engine, engine_of
from tests.wrap_with import wrap_with

HALF = torch.float16
MAX_NORM = 0.3  # no power of two: then order and number of roundings show
RATE = 2e-3
TOO_LARGE = 2.0**40

HOMES = pytest.mark.parametrize("offload", ["weights", "none", "max"])


def half_model(
    tiny: Any,
    family: str = "llama",
    scale: float = FIRST,
    interval: int = 2000,
    **options: Any,
) -> tuple[nn.Module, Engine]:
    """A wrapped fp16 model with a loss scale, and its engine."""
    model = wrap_with(tiny(family, HALF), **options)
    engine = engine_of(model)
    engine.loss_scale = LossScale(engine.device.torch_device, scale, interval)
    return model, engine


def adamw(model: nn.Module) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.1)


def step(
    model: nn.Module, optimizer: torch.optim.Optimizer, inputs: dict[str, Tensor]
) -> tuple[float, float]:
    """One step as the trainer makes it: loss, and norm before clipping."""
    engine = engine_of(model)
    assert engine.loss_scale is not None
    loss = model(**inputs).loss
    engine.loss_scale.of(loss).backward()
    norm = engine.clip_grad_norm(MAX_NORM, [loss])
    optimizer.step()
    optimizer.zero_grad()
    return float(loss.detach()), norm.value()


def state(model: nn.Module) -> dict[str, Tensor]:
    """Everything that training changes, as copies."""
    engine = engine_of(model)
    return {
        f"{shard}.{name}": tensor.clone()
        for shard, tensors in engine.state_shards()
        for name, tensor in tensors.items()
    }


def masters(engine: Engine) -> dict[str, Tensor]:
    """fp32 masters by group and parameter."""
    return {f"{g.name}.{m.name}": m.states()["master"] for g, m in members(engine)}


def members(engine: Engine) -> list[tuple[Any, Member]]:
    engine.flush()
    return [(g, m) for g in engine.groups for m in g.members]
