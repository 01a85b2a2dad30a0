"""Writes configurations in the words of transformers 4 and of transformers 5, side by side.

Version 5 has renamed keys; each version reads its own and passes over the other's. Version 4 takes
a base of 10000 where it finds no `rope_theta`, without a word, and knows no tokenizer by the name
of a class that version 5 has made. Servers read with whichever version they bring. Dictionaries in,
dictionaries out.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Config = dict[str, Any]

DTYPE_NAMES = ("dtype", "torch_dtype")
_NEOX = ("gpt_neox", "gpt_neox_japanese")  # with names of their own for base and share
_LOCAL_BASE = ("gemma3", "gemma3_text", "gemma3n_text", "t5gemma2")  # of sliding attention
# Before 4.53 they had a number in place of `layer_types`.
_PATTERNED = ("gemma2", "gemma3", "gemma3_text", "cohere2")
_FULL, _SLIDING = "full_attention", "sliding_attention"
_BESIDE_SCALING = ("rope_theta", "partial_rotary_factor")  # keys of version 4 at the top
_RENAMED = {"qwen3_moe": {"num_experts": "num_local_experts"}}  # of kinds: the older name first
_CLASSES = {"TokenizersBackend": "PreTrainedTokenizerFast"}
_OF_LOADING = ("is_local", "local_files_only")  # how the tokenizer was loaded, not what it is


def model_in_both(config: Mapping[str, Any], known: Mapping[str, Any], dtype: str) -> Config:
    """Return a model's configuration with both spellings, its weights being stored in `dtype`.

    known: the configuration as version 5 understood it; what `config` says itself stays.
    """
    made = _part_in_both(config, known)
    for key, part in config.items():
        if isinstance(part, Mapping) and ("model_type" in part or key.endswith("_config")):
            inner = known.get(key)
            made[key] = _part_in_both(part, inner if isinstance(inner, Mapping) else {})
            if any(name in part for name in DTYPE_NAMES):
                made[key] |= dict.fromkeys(DTYPE_NAMES, dtype)
    return made | dict.fromkeys(DTYPE_NAMES, dtype)


def tokenizer_in_both(config: Mapping[str, Any]) -> Config:
    """Return a tokenizer's configuration that both versions read."""
    made = {key: value for key, value in config.items() if key not in _OF_LOADING}
    kind = made.get("tokenizer_class")
    if kind in _CLASSES:
        made["tokenizer_class"] = _CLASSES[kind]
    extra = made.get("extra_special_tokens")
    if isinstance(extra, list):  # version 4 wants a dictionary under this name
        del made["extra_special_tokens"]
        made.setdefault("additional_special_tokens", extra)
    return made


def _part_in_both(part: Mapping[str, Any], known: Mapping[str, Any]) -> Config:
    made, kind = dict(part), str(part.get("model_type", ""))
    for older, newer in _RENAMED.get(kind, {}).items():
        if newer in part:
            made.setdefault(older, part[newer])
    if kind in _PATTERNED and (every := _whole_every(made.get("layer_types"))):
        made.setdefault("sliding_window_pattern", every)
    parameters = known.get("rope_parameters") or part.get("rope_parameters")
    if not isinstance(parameters, Mapping) or not parameters:
        return made
    for name, value in _rope_of_4(parameters, kind).items():
        if made.get(name) is None or (name != "rope_scaling" and made[name] != value):
            made[name] = value
    if "rope_parameters" not in made and not _is_nested(parameters):
        made["rope_parameters"] = dict(parameters)
    return made


def _rope_of_4(parameters: Mapping[str, Any], kind: str) -> Config:
    """Return the rotary embeddings in the words of version 4."""
    if _is_nested(parameters):
        whole, local = parameters.get(_FULL), parameters.get(_SLIDING)
        if not isinstance(whole, Mapping):
            return {}
        found = _rope_of_4(whole, kind)
        if kind.startswith("modernbert"):
            found["global_rope_theta"] = whole.get("rope_theta")
        if isinstance(local, Mapping):
            if kind in _LOCAL_BASE:
                found["rope_local_base_freq"] = local.get("rope_theta")
            elif kind.startswith("modernbert"):
                found["local_rope_theta"] = local.get("rope_theta")
        return found
    found = {"rope_scaling": _scaling(parameters, kind)}
    base, share = (parameters.get(name) for name in _BESIDE_SCALING)
    if base is not None:
        found["rotary_emb_base" if kind in _NEOX else "rope_theta"] = base
    if share is not None:
        found["rotary_pct" if kind in _NEOX else "partial_rotary_factor"] = share
    return found


def _whole_every(kinds: Any) -> int | None:
    """Return `n` where each nth layer attends to everything and the others to a window."""
    if not isinstance(kinds, list) or _FULL not in kinds:
        return None
    every = kinds.index(_FULL) + 1
    wanted = [_SLIDING if number % every else _FULL for number in range(1, len(kinds) + 1)]
    return every if kinds == wanted else None


def _scaling(parameters: Mapping[str, Any], kind: str) -> Config | None:
    """Return what version 4 calls `rope_scaling`; None where nothing is scaled."""
    rest = {name: value for name, value in parameters.items() if name not in _BESIDE_SCALING}
    if rest.get("rope_type", "default") == "default" and not set(rest) - {"rope_type", "type"}:
        return None
    if kind == "phi3":  # its class in version 4 takes these three keys and no other
        kept = ("short_factor", "long_factor")
        return {"type": rest.get("rope_type")} | {n: v for n, v in rest.items() if n in kept}
    return rest


def _is_nested(parameters: Mapping[str, Any]) -> bool:
    """Return whether each kind of layer has its own parameters."""
    return all(value is None or isinstance(value, Mapping) for value in parameters.values())
