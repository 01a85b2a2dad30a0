"""Carries tensors of a checkpoint that its text model does not use into the saved model.

Checkpoints hold more than the class that is trained: the part that sees pictures, or layers that
predict further tokens. They stay mapped from their files and take no memory.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from safetensors import safe_open
from torch import Tensor
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    rename_source_key,
    revert_weight_conversion,
)

from fluxtrain.models.model_files import ModelFiles, safetensors_header
from fluxtrain.models.tensor_files import save_tensors

_INDEX = "model.safetensors.index.json"


def parameter_names(
    names: Iterable[str], model: PreTrainedModel
) -> tuple[dict[str, str], set[str]]:
    """Return the parameter that each tensor of a checkpoint becomes in `model`, by its name in the
    files, and the parameters that loading makes of other tensors.

    Renames as transformers does while it loads (core_model_loading.py, 5.x).
    """
    transforms = get_model_conversion_mapping(model)
    renamings = [t for t in transforms if isinstance(t, WeightRenaming)]
    converters = [t for t in transforms if isinstance(t, WeightConverter)]
    known: dict[str, Any] = model.state_dict()
    prefix = model.base_model_prefix
    found, converted = {}, set()
    for name in names:
        renamed, source = rename_source_key(name, renamings, converters, prefix, known)
        if renamed not in known and name in known:
            renamed, source = rename_source_key(name, [], [], prefix, known)
        found[name] = renamed
        if source is not None:
            converted.add(renamed)
    return found, converted


def tensors_beside(
    files: ModelFiles, model: PreTrainedModel
) -> tuple[dict[str, Tensor], tuple[str, ...]]:
    """Return the tensors of the files that the loaded `model` does not use, and the names of those
    that cannot be carried: `model` would be saved under other names than the files have, so that
    no class reads both."""
    known: dict[str, Tensor] = model.state_dict(keep_vars=True)
    becomes, _ = parameter_names(files.tensors, model)
    further = {name for name, parameter in becomes.items() if parameter not in known}
    if not further:
        return {}, ()
    own = {id(tensor): (name, tensor) for name, tensor in reversed(known.items())}  # tied ones once
    saved = revert_weight_conversion(
        model, {name: tensor.detach().to("meta") for name, tensor in own.values()}
    )
    if not saved.keys() <= files.tensors.keys():
        return {}, tuple(sorted(name for name in further if name.endswith("weight")))  # no masks
    found: dict[str, Tensor] = {}
    for path in files.weights:
        with safe_open(path, "pt") as file:
            found |= {name: file.get_tensor(name) for name in file.keys() if name in further}  # noqa: SIM118
    return found, ()


def add_tensors(folder: Path, tensors: Mapping[str, Tensor], shard_bytes: int) -> None:
    """Add shards of further tensors to a saved model, and name all shards in its index."""
    if not tensors:
        return
    shards = sorted(folder.glob("model*.safetensors"))
    parts: list[dict[str, Tensor]] = [{}]
    for name, tensor in tensors.items():
        if parts[-1] and sum(t.nbytes for t in parts[-1].values()) + tensor.nbytes > shard_bytes:
            parts.append({})
        parts[-1][name] = tensor
    total = len(shards) + len(parts)
    numbered = [f"model-{number:05}-of-{total:05}.safetensors" for number in range(1, total + 1)]
    places: dict[str, str] = {}
    for path, name in zip(shards, numbered, strict=False):
        places |= dict.fromkeys(safetensors_header(path), name)
        path.rename(folder / name)
    for part, name in zip(parts, numbered[len(shards) :], strict=True):
        save_tensors(part, folder / name)
        places |= dict.fromkeys(part, name)
    size = sum((folder / name).stat().st_size for name in numbered)
    index = {"metadata": {"total_size": size}, "weight_map": dict(sorted(places.items()))}
    (folder / _INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
