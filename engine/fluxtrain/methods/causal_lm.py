"""Causal language modelling: predict the next token of packed rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from fluxtrain.data.batches import Batch
from fluxtrain.models.known_packing import known_packing

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


class CausalLM:
    """The mean cross entropy over labelled tokens, of Hugging Face causal language models."""

    unit = "tokens"

    def count(self, batch: Batch) -> int:
        """Count the labels, which the loss is a mean over."""
        return batch.predicted

    def rows(self, batch: Batch) -> int:
        """Count the packed rows."""
        return int(batch.input_ids.shape[0])

    def tokens(self, batch: Batch) -> int:
        """Count the tokens that are no padding."""
        return batch.tokens

    def loss(self, model: nn.Module, batch: Batch, step_count: int) -> Tensor:
        """Compute the summed cross entropy of the batch in nats, divided by `step_count` labels.

        What the model adds to it (the router loss of experts) counts with the batch's share.
        """
        entropy, rest = self._terms(model, batch, step_count)
        return entropy if rest is None else entropy + rest * (batch.predicted / step_count)

    def metrics(self, model: nn.Module, batch: Batch) -> Mapping[str, float]:
        """Compute the mean cross entropy in nats a token, without what the model adds to it."""
        return {"loss": float(self._terms(model, batch, batch.predicted)[0])}

    def _terms(
        self, model: nn.Module, batch: Batch, step_count: int
    ) -> tuple[Tensor, Tensor | None]:
        with known_packing(mixes=batch.mixes):
            return cross_entropy_and_rest(model, lambda: model(**batch.inputs(step_count)))

    def to(self, batch: Batch, device: torch.device) -> Batch:
        """Copy ids, labels and positions to `device`."""
        return replace(
            batch,
            input_ids=batch.input_ids.to(device),
            labels=batch.labels.to(device),
            position_ids=batch.position_ids.to(device),
        )
