"""What of an adapter changes nothing is told in a note: peft is silent about it."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from peft.utils.other import get_pattern_key
from safetensors import safe_open

from fluxtrain.exporting.adapter_config import CONFIG
from fluxtrain.exporting.source import AdapterSource
from fluxtrain.models.model_files import safetensors_header

_log = logging.getLogger(__name__)
_PREFIX = "base_model.model."
_LORA = re.compile(r"(.+)\.lora_(?:(?:embedding_)?(A|B)(?:\.weight)?|B\.(bias))")


def note_without_effect(source: AdapterSource) -> None:
    """Warn of an adapter that changes nothing."""
    if note := _idle(source, safetensors_header(source.weights)):
        _log.warning("note: %s", note)


def _idle(source: AdapterSource, header: Mapping[str, Any]) -> str:
    """Say that all of LoRA's layers add zeros; "" where one adds more, or the file holds more than
    LoRA's tensors."""
    layers = _lora_layers(header)
    if not layers or getattr(source.config, "layer_replication", None):
        return ""
    scaled = zeros = 0
    with safe_open(source.weights, "pt") as file:
        for layer, names in layers.items():
            if _scale(source.config, layer, header[names["A"]]["shape"][0]) == 0:
                scaled += 1
            elif _any(file, names, "bias") or (_any(file, names, "A") and _any(file, names, "B")):
                return ""
            else:
                zeros += 1
    parts = {
        f"{CONFIG} scales {scaled:,} of {len(layers):,} layers by 0 (lora_alpha)": scaled,
        f"{zeros:,} of {len(layers):,} layers have zeros alone in A or B, as before any "
        "training": zeros,
    }
    return (
        f"the adapter {source.folder} changes nothing of its base: "
        f"{' and '.join(words for words, count in parts.items() if count)}; name a trained one, or "
        "copy or download it again"
    )


def _lora_layers(names: Iterable[str]) -> dict[str, dict[str, str]]:
    """Return the names of each layer's tensors as `A`, `B` and `bias`; nothing where the file holds
    others."""
    layers: dict[str, dict[str, str]] = {}
    for name in names:
        found = _LORA.fullmatch(name)
        if found is None:
            return {}
        layers.setdefault(found[1], {})[found[2] or found[3]] = name
    return layers if all({"A", "B"} <= parts.keys() for parts in layers.values()) else {}


def _scale(config: Any, layer: str, rank: int) -> float:
    """Return what peft multiplies a layer's adapter with, in fp32."""
    key = get_pattern_key(list(config.alpha_pattern), layer.removeprefix(_PREFIX))
    alpha = config.alpha_pattern.get(key, config.lora_alpha)
    scale = alpha / (rank**0.5 if config.use_rslora else rank)
    return float(torch.tensor(scale, dtype=torch.float32))


def _any(file: Any, names: Mapping[str, str], part: str) -> bool:
    """Is a number of this tensor other than 0?"""
    return part in names and bool(file.get_tensor(names[part]).float().any())
