"""Tells a model's cross entropy from the terms that the model adds to it itself.

Mixtures of experts add a loss that balances their router. It is a mean over the tokens of one pass,
so under gradient accumulation it counts with the pass's share of the step, like the cross entropy.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

Forward = Callable[[], Any]


def cross_entropy_and_rest(model: nn.Module, forward: Forward) -> tuple[Tensor, Tensor | None]:
    """Call `forward`, which runs `model` with labels; return its cross entropy, and what else is in
    its loss: None for models that add nothing."""
    if not _adds_terms(model):
        loss: Tensor = forward().loss
        return loss, None
    known: Any = model
    own, found = known.loss_function, list[Tensor]()

    def noted(*arguments: Any, **options: Any) -> Tensor:
        entropy: Tensor = own(*arguments, **options)
        found.append(entropy)
        return entropy.clone()  # models add to it in place

    had = known.__dict__.get("_loss_function")
    known.loss_function = noted
    try:
        whole: Tensor = forward().loss
    finally:
        if had is None:
            del known._loss_function
        else:
            known._loss_function = had
    return (found[0], whole - found[0]) if len(found) == 1 else (whole, None)


def _adds_terms(model: nn.Module) -> bool:
    config: Any = getattr(model, "config", None)
    if config is None or not hasattr(model, "loss_function"):
        return False
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    return bool(getattr(text, "output_router_logits", False))
