"""The weights of a base as training computed with them: in its dtype, packed and unpacked."""

from __future__ import annotations

import torch
from torch import Tensor

from fluxtrain.exporting.base_files import BaseFiles
from fluxtrain.plan.states import StorageFormat
from fluxtrain.quantization.layout import PackedLayout
from fluxtrain.quantization.packing import pack, unpack


class TrainedBase:
    """Reads weights of a base; those in `packed` become what their format makes of them."""

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
        """Return what training computed with for a parameter stored as `tensor`."""
        weight = tensor.to(self.dtype) if tensor.is_floating_point() else tensor
        if self._storage == "plain" or parameter not in self._packed:
            return weight
        return dequantised(weight, self._storage, parameter)

    def is_packed(self, parameter: str) -> bool:
        """Was it packed in training?"""
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
