"""AdamW of other packages, for models that live wholly on the device: imported when asked for."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from fluxtrain.errors import BadInput


@dataclass(frozen=True, kw_only=True)
class ThirdParty:
    """The package of an optimizer, and its arguments besides rate, betas and epsilon."""

    package: str
    module: str
    name: str
    extra: str  # of this project, which installs it
    needs_gpu: bool = False
    options: tuple[tuple[str, Any], ...] = ()


THIRD_PARTY = {
    "bnb-adamw-8bit": ThirdParty(
        package="bitsandbytes", module="bitsandbytes.optim", name="AdamW8bit", extra="bitsandbytes"
    ),
    "bnb-paged-adamw-8bit": ThirdParty(
        package="bitsandbytes",
        module="bitsandbytes.optim",
        name="PagedAdamW8bit",
        extra="bitsandbytes",
        needs_gpu=True,
    ),
    "torchao-adamw-4bit": ThirdParty(
        package="torchao",
        module="torchao.optim",
        name="AdamW4bit",
        extra="torchao",
        options=(("bf16_stochastic_round", True),),  # without masters, small updates would vanish
    ),
}


def check_third_party(name: str, device: str) -> None:
    """Raise BadInput if the optimizer `name` is not available on `device` (cpu, cuda)."""
    found = THIRD_PARTY[name]
    if importlib.util.find_spec(found.package) is None:
        raise BadInput(
            f"train.optimizer={name} needs the package {found.package}, which is not installed: "
            f"pip install 'fluxtrain[{found.extra}]', or use train.states=8bit, which needs nothing"
        )
    if found.needs_gpu and device == "cpu":
        raise BadInput(f"train.optimizer={name} pages between a GPU and the host: it needs a GPU")


def third_party_optimizer(
    name: str,
    groups: Iterable[dict[str, Any]],
    *,
    lr: float,
    betas: tuple[float, float],
    eps: float,
) -> torch.optim.Optimizer:
    """Make the optimizer `name` over parameter groups with their own rate and decay.

    Raises BadInput if its package is too old or cannot be loaded.
    """
    found = THIRD_PARTY[name]
    try:
        kind = getattr(importlib.import_module(found.module), found.name)
        made: torch.optim.Optimizer = kind(
            list(groups), lr=lr, betas=betas, eps=eps, **dict(found.options)
        )
    except (ImportError, AttributeError, TypeError) as error:
        raise BadInput(
            f"train.optimizer={name}: {found.package} cannot be used ({error}): "
            f"pip install --upgrade 'fluxtrain[{found.extra}]'"
        ) from error
    return made
