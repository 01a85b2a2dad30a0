"""Predicts which weights loading will copy, from the headers of a model's files.

transformers maps a tensor of a safetensors file if it has the parameter's name, shape and dtype;
its memory is then pages of that file. Everything else is a copy, and all copies exist before the
first group is moved to its arena: weights in another dtype, and weights merged from several tensors
(experts) or cut out of larger ones, whose sources are converted first, all at once as well. Saving
the model splits merged weights again, which copies them. Source:
transformers/core_model_loading.py, 5.x.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from torch import nn

from fluxtrain.errors import BadInput
from fluxtrain.models.model_files import FLOATS, ModelFiles, StoredTensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Copied:
    """The weights of a model that are no pages of its files, in bytes on the host."""

    weights_bytes: int = 0
    sources_bytes: int = 0  # their sources, freed once they are made
    merged_bytes: int = 0  # of them, merged from several tensors: split when saved
    odd_dtypes: tuple[str, ...] = ()  # one entry for each weight stored in another dtype than most


def copied_by_loading(model: nn.Module, files: ModelFiles | None, stored_dtype: str) -> Copied:
    """Predict the copies for a model on the meta device in the dtype of its training.

    Without files (`config.json` alone) all weights count as stored unchanged, in `stored_dtype`;
    pickled ones count as copies.

    Raises BadInput for a weight whose stored dtype is not floating point.
    """
    if files is not None and files.pickled:
        return Copied(weights_bytes=sum(p.nbytes for p in model.parameters()))
    if files is None:
        unlike = (p for p in model.parameters() if _name(p) != stored_dtype)
        return Copied(weights_bytes=sum(p.nbytes for p in unlike))
    left = dict(files.tensors)
    pairs = [(p, _taken(left, names, tuple(p.shape))) for p, names in _named(model)]
    found = [(p, stored) for p, stored in pairs if stored is not None]
    renamed, merged = _by_shape([p for p, stored in pairs if stored is None], left)
    _refuse_codes(files, [stored for _, stored in (*found, *renamed)])
    converted = [p for p, stored in (*found, *renamed) if stored.dtype != _name(p)]
    merged_bytes = sum(p.nbytes for p in merged)
    dtypes = {_name(p) for p in merged}
    sources = any(stored.dtype not in dtypes for stored in left.values())
    return Copied(
        weights_bytes=sum(p.nbytes for p in converted) + merged_bytes,
        sources_bytes=merged_bytes if sources else 0,
        merged_bytes=merged_bytes,
        odd_dtypes=tuple(
            stored.dtype
            for p, stored in (*found, *renamed)
            if stored.dtype not in (stored_dtype, _name(p))
        ),
    )


def _refuse_codes(files: ModelFiles, stored: list[StoredTensor]) -> None:
    """Raise BadInput for integers and 8-bit floats: they are codes, but would load as weights."""
    codes = [tensor.dtype for tensor in stored if tensor.dtype not in FLOATS]
    if codes:
        raise BadInput(
            f"{files.folder} stores {len(codes)} of its weights as {codes[0]}, without "
            "`quantization_config`, and full training needs bf16 or fp32: name the original, "
            "unquantised model"
        )


def _named(model: nn.Module) -> list[tuple[nn.Parameter, list[str]]]:
    """Return every parameter once, with the names that it may be stored under: the names of tied
    parameters, each with and without the prefix of the inner model."""
    prefix = getattr(model, "base_model_prefix", "") + "."
    names: dict[nn.Parameter, list[str]] = defaultdict(list)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names[parameter] += [name, name.removeprefix(prefix), prefix + name]
    return list(names.items())


def _taken(
    left: dict[str, StoredTensor], names: list[str], shape: tuple[int, ...]
) -> StoredTensor | None:
    """Take the first tensor of that shape out of the remaining ones, with all its names."""
    there = [name for name in names if name in left and left[name].shape == shape]
    found = [left.pop(name) for name in dict.fromkeys(there)]
    return found[0] if found else None


def _by_shape(
    parameters: list[nn.Parameter], left: dict[str, StoredTensor]
) -> tuple[list[tuple[nn.Parameter, StoredTensor]], list[nn.Parameter]]:
    """Split parameters into those that the files have under an older name, and all others."""
    by_shape: dict[tuple[int, ...], list[str]] = defaultdict(list)
    for name, stored in left.items():
        by_shape[stored.shape].append(name)
    renamed, made = [], []
    for parameter in parameters:
        alike = by_shape[tuple(parameter.shape)]
        if alike:
            renamed.append((parameter, left.pop(alike.pop())))
        else:
            made.append(parameter)
    return renamed, made


def _name(parameter: nn.Parameter) -> str:
    return str(parameter.dtype).removeprefix("torch.")
