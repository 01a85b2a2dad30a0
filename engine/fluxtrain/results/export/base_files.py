"""The weights of a base in its files, by the names of the files and of the model's parameters; and
as training computed with them: in its dtype, packed and unpacked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor
from transformers import PreTrainedModel

from fluxtrain.core.quantization.layout import PackedLayout
from fluxtrain.core.quantization.packing import pack, unpack
from fluxtrain.errors import BadInput
from fluxtrain.models.carried import parameter_names
from fluxtrain.models.model_files import ModelFiles, StoredTensor, safetensors_header
from fluxtrain.plan.states import StorageFormat


@dataclass(frozen=True, kw_only=True)
class BaseFiles:
    """A base's tensors, mapped from their files; none is read before it is asked for."""

    files: ModelFiles
    shards: Mapping[str, Path]  # by the tensor's name in the files, in their order
    parameters: Mapping[str, str]  # the model's name of each tensor, by its name in the files
    converted: frozenset[str]  # parameters that loading makes of other tensors
    tied: tuple[tuple[str, ...], ...]  # names of parameters that are one

    @property
    def stored(self) -> Mapping[str, StoredTensor]:
        """Return dtype and shape of each tensor by its name in the files."""
        return self.files.tensors

    def tensor(self, name: str) -> Tensor:
        """Return a tensor by its name in the files, mapped."""
        with safe_open(self.shards[name], "pt") as file:
            found: Tensor = file.get_tensor(name)
        return found

    def stored_name(self, parameter: str) -> str | None:
        """Return the name in the files of a parameter, or of one that it is tied to."""
        names = next((names for names in self.tied if parameter in names), (parameter,))
        by_parameter = {p: name for name, p in self.parameters.items() if p in names}
        return by_parameter.get(parameter) or next(iter(by_parameter.values()), None)


def base_files(files: ModelFiles, empty: PreTrainedModel) -> BaseFiles:
    """Find which parameter of `empty` (on the meta device) each tensor of the files becomes.

    Raises BadInput for pickled weights.
    """
    if files.pickled:
        raise BadInput(
            f"{files.weights[0]} is a pickle, which is not read tensor by tensor: load the base "
            "with transformers where you trust it, save_pretrained() it, and name that with --base"
        )
    shards: dict[str, Path] = {}
    for path in files.weights:
        header = safetensors_header(path)
        shards |= dict.fromkeys(sorted(header, key=lambda n: header[n]["data_offsets"]), path)
    parameters, converted = parameter_names(shards, empty)
    return BaseFiles(
        files=files,
        shards=shards,
        parameters=parameters,
        converted=frozenset(converted),
        tied=_tied(empty),
    )


def _tied(empty: PreTrainedModel) -> tuple[tuple[str, ...], ...]:
    names: dict[int, list[str]] = {}
    for name, parameter in empty.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return tuple(tuple(group) for group in names.values() if len(group) > 1)


class TrainedBase:
    """Reads weights of a base; those in `packed` pass through their packed format."""

    def __init__(
        self, base: BaseFiles, dtype: torch.dtype, storage: StorageFormat, packed: frozenset[str]
    ) -> None:
        self.base = base
        self.dtype = dtype
        self._storage = storage
        self._packed = packed

    def read(self, parameter: str) -> Tensor:
        """Return a parameter of the base in the dtype of training."""
        name = self.base.stored_name(parameter)
        assert name is not None, parameter
        return self.of(self.base.tensor(name), parameter)

    def of(self, tensor: Tensor, parameter: str) -> Tensor:
        """Return the values with which training computed, for a parameter stored as `tensor`."""
        weight = tensor.to(self.dtype) if tensor.is_floating_point() else tensor
        if self._storage == "plain" or parameter not in self._packed:
            return weight
        return dequantised(weight, self._storage, parameter)

    def is_packed(self, parameter: str) -> bool:
        """Return whether the parameter was packed in training."""
        return self._storage != "plain" and parameter in self._packed


def dequantised(weight: Tensor, storage: StorageFormat, name: str) -> Tensor:
    """Pack a weight and unpack it again, in its shape and dtype."""
    assert storage != "plain"
    layout = PackedLayout.of(storage, [tuple(weight.shape)])
    packed = torch.zeros(layout.size_bytes, dtype=torch.uint8)
    pack(layout, 0, weight, packed, name=name)
    dense = torch.empty(layout.elements, dtype=weight.dtype)
    unpack(layout, packed, dense)
    return dense[: weight.numel()].view(weight.shape)
