"""Refuses adapters that would be applied in another way than they were trained, and says why.

Their file is loaded strictly by peft: every tensor of it is used, and every layer gets its own.
"""

from __future__ import annotations

import json
import logging
import math
import re
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields
from importlib.metadata import version
from pathlib import Path
from typing import Any

from peft import PeftConfig
from peft.utils.save_and_load import get_peft_model_state_dict
from safetensors import safe_open

from fluxtrain.errors import BadInput, brief
from fluxtrain.machine.failures import as_told
from fluxtrain.models.model_files import safetensors_header

_log = logging.getLogger(__name__)
CONFIG = "adapter_config.json"
# Kinds whose adapters compute in the layers alone, as peft computes them (tests compare); others
# need tokens, hooks or arguments that peft passes around the model.
APPLIED = frozenset(
    {
        "LORA", "BEFT", "BOFT", "C3A", "DEFT", "DELORA", "FOURIERFT", "GLORA", "GRALORA",
        "HIRA", "HRA", "IA3", "LILY", "LN_TUNING", "LOHA", "LOKR", "MISS", "OFT", "PEANUT", "PVERA",
        "RANDLORA", "ROAD", "SHIRA", "TINYLORA", "TRAINABLE_TOKENS", "VBLORA", "VERA", "WAVEFT",
    }
)  # fmt: skip
_LORA_KEYS = ("r", "lora_alpha", "target_modules")  # that peft always writes
_REWRITE_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")  # of LoRA's init_lora_weights
_DTYPES = frozenset({"F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2"})  # as safetensors has them
_AGAIN = "copy or download the adapter again"
_MERGE = (
    "merge it with peft's merge_and_unload, with the whole model in memory, where peft can, and "
    "name the folder of the result"
)
_PREFIX = "base_model.model."
_WRAPPERS = re.compile(r"\b(?:base_layer|original_module|token_adapter|modules_to_save\.default)\.")
_MATRIX = re.compile(r".+\.lora_(?:embedding_)?([AB])(?:\.weight)?")


def read_adapter_config(folder: Path, tensors: Mapping[str, Any]) -> Any:
    """Return peft's configuration of the adapter in `folder`; `tensors` is its weights' header.

    Raises BadInput, naming the value, for one that is damaged or that FluxTrain does not apply.
    """
    path = folder / CONFIG
    content = _content(path)
    is_lora = content.get("peft_type", "LORA") == "LORA" and any(".lora_" in n for n in tensors)
    wanted = ("peft_type", *(_LORA_KEYS if is_lora else ()))
    if lacking := [key for key in wanted if key not in content]:
        raise BadInput(
            f"{path} lacks {', '.join(lacking)}, which peft's save_pretrained writes: save the "
            "adapter again with peft, or copy or download the file again"
        )
    for key, value in content.items():
        if not _is_finite(value):
            raise BadInput(f"{path}: {brief(key)} is not finite ({brief(repr(value))}): {_AGAIN}")
    named = content.get("base_model_name_or_path")
    if not isinstance(named, str | None):
        raise BadInput(f"{path}: base_model_name_or_path is {named!r:.80}, and no name: {_AGAIN}")
    try:
        config = PeftConfig.from_pretrained(str(folder))
    except Exception as error:  # whatever a damaged file makes the library raise
        raise _unreadable(path, error) from error
    _refuse_what_is_not_applied(config, path, content)
    _refuse_other_dtypes(folder, tensors)
    return config


def _content(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise _unreadable(path, error) from error
    if not isinstance(found, dict):
        raise _unreadable(path, ValueError("no JSON object"))
    return found


def _unreadable(path: Path, error: Exception) -> BadInput:
    return BadInput(
        f"{path} cannot be read by peft ({brief(str(error))}): copy or download it again"
    )


def _is_finite(value: Any) -> bool:
    """Return whether all numbers in a value of JSON are finite: NaN would reach every weight."""
    if isinstance(value, dict | list):
        return all(map(_is_finite, value.values() if isinstance(value, dict) else value))
    return not isinstance(value, float) or math.isfinite(value)


def _refuse_what_is_not_applied(config: Any, path: Path, content: Mapping[str, Any]) -> None:
    """Raise BadInput for a kind of adapters or an option that would be left out silently."""
    kind = _kind(config)
    start = getattr(config, "init_lora_weights", None)
    known = {field.name for field in fields(config)}
    unknown = [key for key in content if key.startswith("use_") and key not in known]
    later = [key for key in unknown if content[key]]
    for is_so, why in (
        (
            getattr(config, "is_prompt_learning", False),
            f"peft_type is {kind}, trained prompts, which are no part of the layers and change no "
            "weight: use them with peft",
        ),
        (
            kind not in APPLIED,
            f"peft_type is {kind}, a kind that FluxTrain does not apply: {_MERGE}",
        ),
        (
            getattr(config, "alora_invocation_tokens", None),
            "alora_invocation_tokens are set, which peft looks for in each text and FluxTrain "
            "does not: use the adapter with peft",
        ),
        (
            getattr(config, "target_parameters", None),
            "target_parameters are set, adapters of weights outside of linear layers, which "
            f"FluxTrain does not apply: {_MERGE}",
        ),
        (
            str(start).lower().startswith(_REWRITE_BASE),
            f"init_lora_weights is {brief(repr(start))}, by which peft rewrites the base: convert "
            "it with peft's save_pretrained(path_initial_model_for_weight_conversion=...), or "
            f"{_MERGE}",
        ),
        (
            later,
            f"{brief(', '.join(later))} is set, an option of {kind} that peft {version('peft')} "
            "does not know and would leave out: install the peft that wrote it",
        ),
    ):
        if is_so:
            raise BadInput(f"{path}: {why}")


def _refuse_other_dtypes(folder: Path, tensors: Mapping[str, Any]) -> None:
    """Raise BadInput for adapters in whole or packed numbers, as quantisers write them: peft would
    take each for what was trained. Places (of SHiRA, VB-LoRA) and counts are whole numbers."""
    odd = [
        name
        for name, one in tensors.items()
        if one["dtype"] not in _DTYPES and one["shape"] and "indices" not in name
    ]
    if odd:
        dtypes = ", ".join(sorted({tensors[name]["dtype"] for name in odd}))
        raise BadInput(
            f"{folder}: {len(odd):,} of the adapter's {len(tensors):,} tensors are {dtypes}, first "
            f"{brief(odd[0])}, and adapters are computed in floating point: save it again in "
            "float32, float16 or bfloat16, dequantised if it was quantised"
        )


# -- on its base ----------------------------------------------------------------------------------


@contextmanager
def peft_refusals(folder: Path) -> Iterator[None]:
    """Raise BadInput in place of peft's error for an adapter that it cannot put on the base."""
    try:
        yield
    except Exception as error:  # of any kind: peft looks at values where it uses them
        if as_told(error) is not None:  # no memory, no file, or refused already
            raise
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        if len(lines) > 1 and lines[0].startswith("Error(s) in loading"):
            del lines[0]
        why = ": ".join((type(error).__name__, *lines[:1])).rstrip(".")
        raise _unfit(folder, brief(why)) from error


def refuse_left_out(weights: Path, model: Any, loaded: Any, own: Collection[str]) -> None:
    """Raise BadInput where peft has left tensors of the file `weights` out, or has asked for more.

    model: peft's. loaded: what peft's loading returned. own: names of the base's parameters, which
    the file may hold too.
    """
    header = safetensors_header(weights)
    asked = get_peft_model_state_dict(model, save_embedding_layers=False)
    if unknown := [name for name in loaded.unexpected_keys if base_name(name) not in own]:
        extra = [name for name in header if name not in asked and base_name(name) not in own]
        raise _unfit(
            weights.parent,
            f"the base has no layer for {(extra or unknown)[0]} by the adapter's configuration "
            f"({_kind(model.peft_config['default'])}, target_modules)",
        )
    # Some kinds convert names, and make what they do not store: only what is both is missing.
    lacking = [name for name in asked if name not in header]
    if lacking and any(_is_of_adapter(name, own) for name in loaded.missing_keys):
        more = f" and {len(lacking) - 1} more" if len(lacking) > 1 else ""
        raise BadInput(
            f"{weights} lacks {lacking[0]}{more}, which its configuration asks for: {_AGAIN}"
        )


def base_name(name: str) -> str:
    """Return the name in the base of a parameter that peft's wrappers lie around."""
    return _WRAPPERS.sub("", name.removeprefix(_PREFIX))


def _is_of_adapter(name: str, own: Collection[str]) -> bool:
    return base_name(name) not in own or ".modules_to_save." in name


def _unfit(folder: Path, why: str) -> BadInput:
    return BadInput(
        f"the adapter {folder} does not fit its base: {why}; name the model that it was trained "
        f"on with --base, or {_AGAIN}"
    )


def _kind(config: Any) -> str:
    return str(getattr(config.peft_type, "value", config.peft_type))


# -- notes -----------------------------------------------------------------------------------------


def note_without_effect(folder: Path, config: Any, weights: Path) -> None:
    """Warn of a LoRA adapter that changes nothing of its base, about which peft is silent."""
    with peft_refusals(folder):
        why = _idle(config, weights)
    if why:
        _log.warning(
            "note: the adapter %s changes nothing of its base: %s; name a trained one, or copy or "
            "download it again",
            folder,
            why,
        )


def _idle(config: Any, weights: Path) -> str:
    """Say why all layers of a LoRA adapter add zeros; "" where one may add more."""
    matrices = {name: _MATRIX.fullmatch(name) for name in safetensors_header(weights)}
    is_lora = config.peft_type == "LORA" and all(matrices.values())
    if not is_lora or config.layer_replication:
        return ""
    if not any((config.lora_alpha, *config.alpha_pattern.values())):
        return f"{CONFIG} scales it by 0 (lora_alpha)"
    with safe_open(weights, "pt") as file:
        for letter in "BA":
            alike = [name for name, found in matrices.items() if found and found[1] == letter]
            if not any(bool(file.get_tensor(name).float().any()) for name in alike):
                return f"all its {letter} matrices hold zeros, as before any training"
    return ""
