"""What of an adapter changes nothing is told in a note: peft is silent about it."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from peft.mapping import PEFT_TYPE_TO_PREFIX_MAPPING
from peft.utils.other import get_pattern_key
from safetensors import safe_open

from fluxtrain.errors import brief
from fluxtrain.exporting.adapter_config import CONFIG
from fluxtrain.exporting.source import AdapterSource
from fluxtrain.models.model_files import safetensors_header

_log = logging.getLogger(__name__)
_PREFIX = "base_model.model."
_LORA = re.compile(r"(.+)\.lora_(?:(?:embedding_)?(A|B)(?:\.weight)?|B\.(bias))")
_MOST_NAMED = 3


def note_without_effect(source: AdapterSource) -> None:
    """Warn of an adapter that changes nothing, and of patterns in its configuration that match no
    layer."""
    header = safetensors_header(source.weights)
    for note in (_idle(source, header), _unmatched(source, header)):
        if note:
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


def _unmatched(source: AdapterSource, names: Iterable[str]) -> str:
    """Name the keys of `rank_pattern` and `alpha_pattern` that are no layer of the adapter."""
    given = [
        (pattern, key)
        for pattern in ("rank_pattern", "alpha_pattern")
        for key in getattr(source.config, pattern, None) or {}
    ]
    own = f".{PEFT_TYPE_TO_PREFIX_MAPPING.get(source.config.peft_type)}"
    layers = {name.partition(own)[0].removeprefix(_PREFIX) for name in names if own in name}
    idle = [
        f"{pattern}[{brief(repr(key))}]"
        for pattern, key in given
        if not any(get_pattern_key([key], layer) == key for layer in layers)
    ]
    if not idle or not layers:
        return ""
    named = ", ".join(idle[:_MOST_NAMED]) + (", ..." if len(idle) > _MOST_NAMED else "")
    return (
        f"{source.folder / CONFIG}: {named}: {len(idle):,} of {len(given):,} pattern keys match "
        f"none of the adapter's {len(layers):,} layers and change nothing: check their names"
    )
