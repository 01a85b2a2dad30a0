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
from fluxtrain.errors import DoesNotFit
from fluxtrain.exporting.adapter_config import peft_refusals
from fluxtrain.exporting.asked_tensors import refuse_left_out
from fluxtrain.exporting.check.mapped import mapped_logits
from fluxtrain.exporting.check.rows import ComparedRows
from fluxtrain.exporting.source import WEIGHTS, AdapterSource
from fluxtrain.guards.wrap_checks import without_advice
from fluxtrain.models.quiet import quiet_peft
from fluxtrain.plan.states import StorageFormat
from fluxtrain.wrapping.engine import engine_of


def with_adapter(model: nn.Module, adapter: Path, source: AdapterSource) -> nn.Module:
    """Put the adapter in folder `adapter`, of the configuration of `source`, beside `model`.

    Raises BadInput where peft cannot, or would leave some of its tensors out.
    """
    own = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    with peft_refusals(adapter), quiet_peft():
        # Trainable ones are never packed with the frozen weights. fp32 adapters stay fp32.
        adapted = PeftModel.from_pretrained(
            model,
            str(adapter),
            is_trainable=True,
            autocast_adapter_dtype=_is_fp32(source),
        )
        refuse_left_out(adapter / WEIGHTS, adapted, own)
    return adapted


def streamed_logits(
    model: nn.Module, rows: ComparedRows, device: str, storage: StorageFormat
) -> Tensor:
    """Return the logits (N, V) at the tokens of `rows`, on the host in the model's dtype.

    The model is wrapped, as it was for training, and of no use afterwards. Where memory lacks for
    that, each part is read from its mapped files when it runs.
    """
    model.eval()
    try:
        with without_advice():
            fluxtrain.wrap(model, device=device, frozen=storage)
    except DoesNotFit:
        return _kept(mapped_logits(model, rows.inputs, device, storage), rows)
    try:
        with torch.no_grad():
            told: Any = model(**rows.inputs)
            return _kept(told.logits.detach() + 0, rows)  # an ordinary tensor, not lazy logits
    finally:
        engine_of(model).close()


def _kept(logits: Tensor, rows: ComparedRows) -> Tensor:
    return logits[rows.kept.to(logits.device)].cpu()


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
