"""Reads an adapter's configuration. Refuses, for all commands alike, what FluxTrain does not apply,
and values by which peft would make other tensors than its file holds, before any is made."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields
from importlib.metadata import version
from pathlib import Path
from typing import Any

from peft import PeftConfig
from peft.mapping import PEFT_TYPE_TO_PREFIX_MAPPING
from peft.utils.other import get_pattern_key

from fluxtrain.errors import BadInput, brief
from fluxtrain.reporting.failures import as_told, first_line

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
_MERGE = (
    "merge it with peft's merge_and_unload, with the whole model in memory, where peft can, and "
    "name the folder of the result"
)
_LOW_RANK = re.compile(r"(.+)\.lora_(?:embedding_)?A(?:\.weight)?")  # of shape (rank, ...)


def read_adapter_config(folder: Path, tensors: Mapping[str, Any]) -> Any:
    """Return peft's configuration of the adapter in `folder`; `tensors` is its weights' header.

    Raises BadInput, naming the value, where it is none or disagrees with the tensors.
    """
    path = folder / CONFIG
    _refuse_lacking(path, tensors)
    try:
        config = PeftConfig.from_pretrained(str(folder))
    except Exception as error:  # whatever a damaged file makes the library raise
        raise BadInput(
            f"{path} cannot be read by peft ({brief(str(error))}): copy or download it again"
        ) from error
    _refuse_what_is_not_applied(config, path)
    _refuse_another_kind(config, path, tensors)
    _refuse_other_dtypes(folder, tensors)
    named = config.base_model_name_or_path
    if not isinstance(named, str | None):
        raise _wrong(path, "base_model_name_or_path", named, "it is the name of a model")
    for key, value in _numbers_of(config, path).items():
        if problem := _problem(key, value):
            raise _wrong(path, key, value, problem)
    if config.peft_type == "LORA":
        _refuse_other_layers(config, path)
        _refuse_other_ranks(config, path, {name: one["shape"] for name, one in tensors.items()})
    return config


@contextmanager
def peft_refusals(folder: Path) -> Iterator[None]:
    """Raise BadInput in place of what peft raises for a configuration that it cannot carry out."""
    try:
        yield
    except Exception as error:  # of any kind: peft looks at values where it uses them
        if as_told(error) is not None:  # no memory, no file
            raise
        raise BadInput(
            f"{folder / CONFIG}: peft cannot put this adapter on its base "
            f"({type(error).__name__}: {brief(first_line(error))}): name the base that it was "
            "trained beside with --base, or copy or download the adapter again"
        ) from error


def _refuse_lacking(path: Path, names: Iterable[str]) -> None:
    """Raise BadInput where keys are missing without which nobody knows what the tensors are."""
    try:
        told = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return  # peft says what is wrong
    if not isinstance(told, dict):
        return
    is_lora = told.get("peft_type", "LORA") == "LORA" and any(".lora_" in name for name in names)
    wanted = ("peft_type", *(_LORA_KEYS if is_lora else ()))
    if lacking := [key for key in wanted if key not in told]:
        raise BadInput(
            f"{path} lacks {', '.join(lacking)}, which peft's save_pretrained writes: save the "
            "adapter again with peft, or copy or download the file again"
        )


def _refuse_what_is_not_applied(config: Any, path: Path) -> None:
    """Raise BadInput for a kind of adapters or an option that would be left out silently."""
    kind = str(getattr(config.peft_type, "value", config.peft_type))
    if getattr(config, "is_prompt_learning", False):
        raise BadInput(
            f"{path}: peft_type is {kind}, learnt prompts, which are no part of the layers and "
            "change no weight: use them with peft"
        )
    if kind not in APPLIED:
        raise BadInput(
            f"{path}: peft_type is {kind}, a kind that FluxTrain does not apply: {_MERGE}"
        )
    if getattr(config, "alora_invocation_tokens", None):
        raise BadInput(
            f"{path} has alora_invocation_tokens, which peft looks for in each text and FluxTrain "
            "does not: use the adapter with peft"
        )
    if getattr(config, "target_parameters", None):
        raise BadInput(
            f"{path} has target_parameters, adapters of weights outside of linear layers, which "
            f"FluxTrain does not apply: {_MERGE}"
        )
    rewrites = str(getattr(config, "init_lora_weights", "")).lower()
    if rewrites.startswith(_REWRITE_BASE):
        raise BadInput(
            f"{path}: init_lora_weights is {brief(repr(config.init_lora_weights))}, by which peft "
            "rewrites the base: convert it with peft's "
            f"save_pretrained(path_initial_model_for_weight_conversion=...), or {_MERGE}"
        )
    known = {field.name for field in fields(config)}
    told = json.loads(path.read_text(encoding="utf-8"))
    unknown = [key for key in told if key.startswith("use_") and key not in known]
    if wanted := [key for key in unknown if told[key]]:
        raise BadInput(
            f"{path}: {brief(wanted[0])} is set, an option of {kind} that peft {version('peft')} "
            "does not know and would leave out: install the peft that wrote it"
        )


def _refuse_another_kind(config: Any, path: Path, names: Iterable[str]) -> None:
    """Raise BadInput where the tensors are those of another kind of adapters."""
    own = PEFT_TYPE_TO_PREFIX_MAPPING.get(config.peft_type)
    if own is None or any(f".{own}" in name for name in names):
        return
    for kind, prefix in PEFT_TYPE_TO_PREFIX_MAPPING.items():
        if other := next((name for name in names if f".{prefix}" in name), None):
            raise BadInput(
                f"{path}: peft_type is {config.peft_type.value}, and {brief(other)} in the file of "
                f"its weights is {kind.value}'s: copy or download the adapter again"
            )


def _refuse_other_dtypes(folder: Path, tensors: Mapping[str, Any]) -> None:
    """Raise BadInput for adapters in whole or packed numbers, as quantisers write them: peft would
    take each for what was trained, or fail. Places (of SHiRA, VB-LoRA) and counts are whole."""
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


def _numbers_of(config: Any, path: Path) -> dict[str, Any]:
    """Return the numbers that say how large adapters are and how much they add, by their names."""
    found = {
        name: getattr(config, name)
        for name in ("r", "lora_alpha", "lora_dropout")
        if hasattr(config, name)
    }
    if getattr(config, "oft_block_size", None) and found.get("r") == 0:
        del found["r"]  # OFT has the one or the other
    for name in ("rank_pattern", "alpha_pattern"):
        pattern = getattr(config, name, {})
        if not isinstance(pattern, dict):
            raise _wrong(path, name, pattern, "it is a mapping of layers")
        for layer in pattern:
            _check_expression(path, name, layer)
        found |= {f"{name}[{layer!r}]": value for layer, value in pattern.items()}
    return found


def _problem(key: str, value: Any) -> str:
    """Say what a number of this name is; "" where the value is one."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    number = number and abs(value) <= sys.float_info.max  # NaN is not
    if key == "r" or key.startswith("rank_pattern"):
        whole = isinstance(value, int) and number
        return "" if whole and value >= 1 else "a rank is a whole number, 1 or more"
    if key == "lora_dropout":
        return "" if number and 0 <= value <= 1 else "it is a share, from 0 to 1"
    return "" if number else "it is a number in the range of a float"


def _refuse_other_layers(config: Any, path: Path) -> None:
    """Raise BadInput where the layers that have adapters are not given as names."""
    for key in ("target_modules", "exclude_modules", "modules_to_save"):
        names = getattr(config, key, None)
        if names is None:
            continue
        several = [names] if isinstance(names, str) else names
        if not isinstance(several, list | tuple | set) or not all(
            isinstance(name, str) for name in several
        ):
            raise _wrong(path, key, names, "it is a list of names of layers")
        if isinstance(names, str):
            _check_expression(path, key, names)


def _check_expression(path: Path, key: str, text: Any) -> None:
    try:
        re.compile(text)
    except (re.error, TypeError, RecursionError, OverflowError) as error:
        raise _wrong(path, key, text, f"it is no regular expression ({error})") from None


def _refuse_other_ranks(config: Any, path: Path, shapes: Mapping[str, list[int]]) -> None:
    """Raise BadInput where a layer's rank is another than that of its tensor."""
    largest = 0
    for name, shape in shapes.items():
        largest = max([largest, *shape])
        found = _LOW_RANK.fullmatch(name)
        if found is None or not shape:
            continue
        layer = found[1].removeprefix("base_model.model.")
        key = get_pattern_key(list(config.rank_pattern), layer)
        named = key in config.rank_pattern
        rank = config.rank_pattern[key] if named else config.r
        if rank != shape[0]:
            raise _wrong(
                path, f"rank_pattern[{key!r}]" if named else "r", rank,
                f"{brief(name)} in the file of its weights has rank {shape[0]:,}",
            )  # fmt: skip
    for key, value in _numbers_of(config, path).items():
        if (key == "r" or key.startswith("rank_pattern")) and value > largest:
            raise _wrong(path, key, value, f"no tensor of its weights is larger than {largest:,}")


def _wrong(path: Path, key: str, value: Any, why: str) -> BadInput:
    told = f"{value:,}" if type(value) is int and abs(value) < 1 << 64 else brief(repr(value))
    return BadInput(
        f"{path}: {brief(key)} is {told}, and {why}: copy or download the adapter again"
    )
