"""Computes a model's logits on some rows, streamed, and gives its memory back."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from torch import Tensor, nn

import fluxtrain
from fluxtrain.device.heap import trim_heap
from fluxtrain.exporting.check.rows import ComparedRows
from fluxtrain.exporting.source import AdapterSource
from fluxtrain.models.quiet import quiet_peft
from fluxtrain.plan.states import StorageFormat
from fluxtrain.wrapping.engine import engine_of


def with_adapter(model: nn.Module, adapter: Path, source: AdapterSource) -> nn.Module:
    """Put the adapter in folder `adapter`, of the configuration of `source`, beside `model`."""
    with quiet_peft():
        # Trainable ones are never packed with the frozen weights. fp32 adapters stay fp32.
        return PeftModel.from_pretrained(
            model,
            str(adapter),
            is_trainable=True,
            autocast_adapter_dtype=_is_fp32(source),
        )


def streamed_logits(
    model: nn.Module, rows: ComparedRows, device: str, storage: StorageFormat
) -> Tensor:
    """Return the logits (N, V) at the tokens of `rows`, on the host in the model's dtype.

    The model is wrapped, and of no use afterwards. Raises DoesNotFit where memory lacks for it.
    """
    fluxtrain.wrap(model, device=device, frozen=storage)
    model.eval()
    try:
        with torch.no_grad():
            told: Any = model(**rows.inputs)
            logits: Tensor = told.logits.detach() + 0  # an ordinary tensor, whatever the head gave
            return logits[rows.kept.to(logits.device)].cpu()
    finally:
        engine_of(model).close()


def give_back_memory() -> None:
    """Return the memory of models that nothing refers to any more."""
    gc.collect()
    trim_heap()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _is_fp32(source: AdapterSource) -> bool:
    from safetensors import safe_open

    with safe_open(source.weights, "pt") as file:
        return any(file.get_slice(n).get_dtype() == "F32" for n in file.keys())  # noqa: SIM118
