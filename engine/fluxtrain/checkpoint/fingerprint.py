"""The settings that must be equal for a run to resume exactly as if it had never stopped."""

from __future__ import annotations

import hashlib
from typing import Any

from torch import nn

from fluxtrain.config.schema import RunConfig
from fluxtrain.units import count_text


def fingerprint(config: RunConfig, model: nn.Module, batch_rows: int) -> dict[str, Any]:
    """Return the settings that must be equal to resume exactly; compared key by key."""
    settings = config.train.model_dump(mode="json")
    keys = (
        "accumulation", "learning_rate", "schedule", "warmup_steps", "weight_decay", "no_decay",
        "betas", "eps", "states", "optimizer", "max_grad_norm", "seed",
    )  # fmt: skip
    return {
        "model": _model_digest(model),
        "method": config.method.name,
        "data.sequence_length": config.data.sequence_length,
        "data.held_out": config.data.held_out,
        "data.seed": config.data.seed,
        "batch_rows": batch_rows,
        **{f"train.{key}": settings[key] for key in keys},
    }


def _model_digest(model: nn.Module) -> str:
    digest = hashlib.sha256()
    count = 0
    for name, parameter in model.named_parameters():
        facts = (name, tuple(parameter.shape), str(parameter.dtype), parameter.requires_grad)
        digest.update(repr(facts).encode())
        count += parameter.numel()
    kind = type(model).__name__
    return f"{kind}, {count_text(count)} parameters ({digest.hexdigest()[:8]})"
