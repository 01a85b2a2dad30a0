"""The loss on held-out rows, weighted by tokens."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import nn

from fluxtrain.data.batches import Batch


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """The mean loss in nats over `tokens` predicted tokens."""

    loss: float
    tokens: int
    seconds: float


def evaluate(
    model: nn.Module, batches: Iterable[Batch], stop: Callable[[], bool] = lambda: False
) -> Evaluation | None:
    """Evaluate `model` as it is now; pending updates must be flushed before.

    The model's training mode is put back. None when there is nothing to evaluate, or when `stop`
    said so between two batches.
    """
    started_s = time.perf_counter()
    was_training = model.training
    total, tokens = 0.0, 0
    model.eval()
    try:
        with torch.no_grad():
            for batch in batches:
                if stop():
                    return None
                total += float(model(**batch.inputs()).loss) * batch.predicted
                tokens += batch.predicted
    finally:
        model.train(was_training)
    if not tokens:
        return None
    return Evaluation(loss=total / tokens, tokens=tokens, seconds=time.perf_counter() - started_s)
