"""One parameter's entry in the state of an optimizer that was taken over: its content, the check
that it is complete, and its conversion to torch's own layout."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from fluxtrain.adamw.dynamic_map import dequantise
from fluxtrain.errors import MisusedModel
from fluxtrain.memory.segment import MASTERS
from fluxtrain.plan.states import STATE_BLOCK

NAMES = {
    "m": "exp_avg",
    "v": "exp_avg_sq",
    "m_scale": "exp_avg_scale",
    "v_scale": "exp_avg_sq_scale",
}
AMONG = "among"  # in each entry: which parameters had one when the state was exported
_MOST_STEPS = 1 << 53
_CURE = "load a whole optimizer state, of this model, or begin without one"


def check_entry(who: str, entry: object, shape: torch.Size | None) -> None:
    """Raise MisusedModel, naming `who`, if moments cannot be read from `entry`.

    shape: the parameter's; None if unknown.
    """
    said = f"the loaded optimizer state for {who}"
    if not isinstance(entry, Mapping):
        raise MisusedModel(f"{said} is of type {type(entry).__name__}, not a dict: {_CURE}")
    for key in ("step", NAMES["m"], NAMES["v"]):
        if key not in entry:
            raise MisusedModel(f"{said} has no {key!r}: {_CURE}")
    _check_step(said, entry["step"])
    tensors = [NAMES["m"], NAMES["v"], *(name for name in MASTERS if name in entry)]
    for key in tensors:
        _check_tensor(said, key, entry[key], shape)
    for key in (NAMES["m"], NAMES["v"]):
        if entry[key].dtype == torch.uint8:
            _check_scales(said, key, entry)


def _check_step(said: str, step: object) -> None:
    number = step.item() if isinstance(step, Tensor) and step.numel() == 1 else step
    if not isinstance(number, int | float) or not 0 <= number < _MOST_STEPS:
        raise MisusedModel(f"{said} counts {step!r} steps: {_CURE}")


def _check_tensor(said: str, key: str, value: object, shape: torch.Size | None) -> None:
    if not isinstance(value, Tensor):
        raise MisusedModel(f"{said} has {type(value).__name__} for {key!r}, not a tensor: {_CURE}")
    if shape is not None and tuple(value.shape) != tuple(shape):
        raise MisusedModel(
            f"{said} has shape {tuple(value.shape)} for {key!r}, the parameter {tuple(shape)}: it "
            "belongs to another model"
        )


def _check_scales(said: str, key: str, entry: Mapping[str, Any]) -> None:
    blocks = -(-entry[key].numel() // STATE_BLOCK)
    scales = entry.get(f"{key}_scale")
    if not isinstance(scales, Tensor) or scales.numel() != blocks:
        raise MisusedModel(f"{said} has {key!r} in 8 bits without its {blocks} scales: {_CURE}")


def check_none_is_missing(entries: Mapping[Any, Any], names: Mapping[int, str]) -> None:
    """Raise MisusedModel if a parameter lost the entry that it had when the state was exported.

    names: of parameters by index. A parameter without a gradient so far never had an entry.
    """
    said = [entry.get(AMONG) for entry in entries.values() if isinstance(entry, Mapping)]
    each = {id(indices): indices for indices in said if isinstance(indices, list | tuple)}
    had = {i for indices in each.values() for i in indices if isinstance(i, int)}
    missing = sorted(had - entries.keys())
    if missing:
        raise MisusedModel(
            f"the loaded optimizer state has lost its entry for "
            f"{names.get(missing[0], f'parameter {missing[0]}')} (of {len(had)} that it was saved "
            f"with {len(missing)} are missing): {_CURE}; to let it alone begin anew, set its "
            "moments and its step to zero"
        )


def wide_moment(entry: Mapping[str, Any], which: str) -> Tensor:
    """Return the moment `which` (m, v) of an entry flat in fp32, whatever its format."""
    key = NAMES[which]
    flat: Tensor = entry[key].reshape(-1)
    scales = entry.get(f"{key}_scale")
    if flat.dtype == torch.uint8 and scales is not None:
        return dequantise(flat, scales.to(flat.device), signed=which == "m")
    return flat.float()


def plain_entry(entry: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return what torch's AdamW keeps for a parameter: `step` (), and moments in fp32 (shape of the
    parameter). Moments that are fp32 in `entry` share its memory."""
    moments = {NAMES[w]: wide_moment(entry, w).view(entry[NAMES[w]].shape) for w in ("m", "v")}
    return {"step": torch.tensor(float(entry["step"]), dtype=torch.float32), **moments}
