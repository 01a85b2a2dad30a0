"""Split parameters into decayed and undecayed groups for AdamW, by the module that owns each."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from torch import nn


def parameter_groups(
    model: nn.Module, *, learning_rate: float, weight_decay: float, no_decay: Collection[str]
) -> list[dict[str, Any]]:
    """Return AdamW's groups of the trained parameters: the decayed ones, then the others.

    `no_decay` names kinds: norms, biases, embeddings. A tied output layer is an embedding. Empty
    groups are left out; each parameter is in exactly one.
    """
    exempt = _exempt(model, no_decay)
    trained = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trained if id(p) not in exempt], "weight_decay": weight_decay},
        {"params": [p for p in trained if id(p) in exempt], "weight_decay": 0.0},
    ]
    return [{**group, "lr": learning_rate} for group in groups if group["params"]]


def _exempt(model: nn.Module, no_decay: Collection[str]) -> set[int]:
    found: set[int] = set()
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if _kind(module, name) in no_decay:
                found.add(id(parameter))
    return found


def _kind(module: nn.Module, name: str) -> str:
    kind = type(module).__name__.lower()
    if isinstance(module, nn.Embedding) or "embedding" in kind:
        return "embeddings"
    if "norm" in kind:
        return "norms"
    return "biases" if name.endswith("bias") else "weights"
