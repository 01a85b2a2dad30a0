"""Adapters in peft's format beside tiny bases, for the tests of exporting."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from fluxtrain.events.answers.answers import ExportAnswer
from fluxtrain.results.adapter.chosen_base import ExportRequest
from fluxtrain.results.export.adapter_export import export


def make_adapter(base: Path, to: Path, *, fp32: bool = False, **settings: Any) -> Path:
    """Write an adapter with random weights, as large as trained ones, for the base."""
    model = AutoModelForCausalLM.from_pretrained(base, dtype="auto")
    config = LoraConfig(
        task_type="CAUSAL_LM", **{"r": 4, "target_modules": "all-linear", **settings}
    )
    adapted = get_peft_model(model, config, autocast_adapter_dtype=fp32)
    draw = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in adapted.parameters():
            if parameter.requires_grad:
                noise = torch.randn(parameter.shape, generator=draw) * 0.05
                parameter.add_(noise.to(parameter.dtype))
    adapted.save_pretrained(to)
    return to


def exported(named: Path | str, **settings: Any) -> ExportAnswer:
    """Export in this process, without words."""
    return export(ExportRequest(named=str(named), **{"merge": True, **settings}), lambda _: None)
