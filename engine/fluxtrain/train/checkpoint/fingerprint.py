"""The settings that must be equal for a run to resume exactly as if it had never stopped."""

from __future__ import annotations

import hashlib
from typing import Any

from torch import nn

from fluxtrain.config.schema import RunConfig
from fluxtrain.units import count_text


def fingerprint(
    config: RunConfig, model: nn.Module, batch_rows: int, learning_rate: float, base: str = ""
) -> dict[str, Any]:
    """Return the settings that must be equal to resume exactly; compared key by key.

    `learning_rate` was chosen where the configuration leaves it to the trainer.
    `base`: the key of the model's weight files. It counts where checkpoints hold no frozen weights.
    """
    settings = config.train.model_dump(mode="json")
    keys = (
        "accumulation", "learning_rate", "schedule", "warmup_steps", "weight_decay", "no_decay",
        "betas", "eps", "states", "optimizer", "max_grad_norm", "seed",
    )  # fmt: skip
    return {
        "model": _model_digest(model),
        **_method(config, base),
        "data.sequence_length": config.data.row_tokens,
        "data.held_out": config.data.held_out,
        "data.seed": config.data.seed,
        "batch_rows": batch_rows,
        "learning rate": learning_rate,
        **{f"train.{key}": settings[key] for key in keys},
    }


def _method(config: RunConfig, base: str) -> dict[str, Any]:
    """Return the method, with what decides the result of adapters."""
    chosen = config.method.model_dump(mode="json")
    if chosen["name"] == "full":
        return {"method": "full"}
    if chosen["name"] != "qlora":
        chosen.pop("base")
    settings = {f"method.{key}": value for key, value in chosen.items() if key != "name"}
    return {"method": chosen["name"], "model.weights": base, **settings}


def _model_digest(model: nn.Module) -> str:
    digest = hashlib.sha256()
    count = 0
    for name, parameter in model.named_parameters():
        facts = (name, tuple(parameter.shape), str(parameter.dtype), parameter.requires_grad)
        digest.update(repr(facts).encode())
        count += parameter.numel()
    kind = type(model).__name__
    return f"{kind}, {count_text(count)} parameters ({digest.hexdigest()[:8]})"
