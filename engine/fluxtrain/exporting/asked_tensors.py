"""Compares the tensors of an adapter's file with those that its configuration asks for: peft loads
what fits, and leaves other layers of the adapter without effect."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from peft.utils.save_and_load import (
    get_peft_model_state_dict,
    load_peft_weights,
    set_peft_model_state_dict,
)
from torch import Tensor

from fluxtrain.errors import BadInput
from fluxtrain.models.model_files import safetensors_header
from fluxtrain.models.quiet import quiet_peft

_PREFIX = "base_model.model."
_WRAPPERS = re.compile(r"\b(?:base_layer|original_module|token_adapter|modules_to_save\.default)\.")


def base_name(name: str) -> str:
    """Return the name in the base of a parameter that peft's wrappers lie around."""
    return _WRAPPERS.sub("", name.removeprefix(_PREFIX))


def refuse_other_tensors(
    weights: Path, model: Any, stored: Mapping[str, tuple[int, ...]], own: Collection[str]
) -> None:
    """Raise BadInput where the tensors in the file `weights` are not those that `model` asks for.

    model: peft's, of the adapter's configuration. stored: their shapes by name. own: parameters of
    the base, which the file may hold too.
    """
    asked = _asked(model)
    for name, shape in stored.items():
        if name not in asked:
            if base_name(name) in own:
                continue
            raise _unasked(weights, name, model)
        if (wanted := tuple(asked[name].shape)) != shape:
            raise of_another_base(
                weights.parent,
                f"{name} is {_sizes(shape)}, and this base asks for {_sizes(wanted)}",
            )
    if lacking := [name for name in asked if name not in stored]:
        raise _lacks(weights, lacking)


def refuse_left_out(weights: Path, model: Any, own: Collection[str]) -> None:
    """Raise BadInput where `model`, which peft has loaded the file `weights` into, has not taken
    all of its tensors, or asks for more. Names that peft converts are not missed."""
    header = safetensors_header(weights)
    asked = _asked(model)
    extra = [n for n in header if n not in asked and base_name(n) not in own]
    lacking = [name for name in asked if name not in header]
    if not extra and not lacking:
        return
    with quiet_peft():
        stored = load_peft_weights(str(weights.parent), device="cpu")
        result: Any = set_peft_model_state_dict(model, stored)
    if any(base_name(name) not in own for name in result.unexpected_keys):
        raise _unasked(weights, extra[0], model)
    if lacking and any(_is_of_adapter(name, own) for name in result.missing_keys):
        raise _lacks(weights, lacking)


def of_another_base(folder: Path, what: str) -> BadInput:
    """Return the refusal of an adapter that does not fit its base."""
    return BadInput(
        f"the adapter {folder} is of another base: {what}; name the model that it was trained "
        "beside with --base, or copy or download the adapter again"
    )


def _asked(model: Any) -> dict[str, Tensor]:
    with quiet_peft():
        found: dict[str, Tensor] = get_peft_model_state_dict(model, save_embedding_layers=False)
    return found


def _is_of_adapter(name: str, own: Collection[str]) -> bool:
    return base_name(name) not in own or ".modules_to_save." in name


def _unasked(weights: Path, name: str, model: Any) -> BadInput:
    kind = model.peft_config["default"].peft_type
    kind = str(getattr(kind, "value", kind))
    return of_another_base(
        weights.parent,
        f"the base has no layer for {name} by the adapter's configuration ({kind}, target_modules)",
    )


def _lacks(weights: Path, lacking: list[str]) -> BadInput:
    more = f" and {len(lacking) - 1} more" if len(lacking) > 1 else ""
    return BadInput(
        f"{weights} lacks {lacking[0]}{more}, which its configuration asks for: copy or download "
        "the adapter again"
    )


def _sizes(shape: tuple[int, ...]) -> str:
    return " x ".join(map(str, shape))
