"""Check in the first steps that a recomputed chunk gives the results of its forward pass."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fluxtrain.core.guards.argument_writes import new_tensor
from fluxtrain.core.guards.arguments import Tree, argument_name
from fluxtrain.core.memory.unit import Unit
from fluxtrain.errors import MisusedModel

_TOLERANCE = 1e-3  # relative; other kernels may be chosen the second time


@dataclass(frozen=True)
class Sums:
    """Checksums of one chunk in the forward pass: of its inputs before it ran, and its results."""

    inputs: list[Tensor]  # () each
    results: Tensor  # ()

    def compare(
        self, unit: Unit, tree: Tree, inputs: Sequence[Tensor], results: Sequence[Tensor]
    ) -> None:
        """Raise MisusedModel when the recomputed `results` differ, and say what changed."""
        before, now = float(self.results), float(checksum(results))
        if _close(before, now):
            return
        differs = (
            f"{unit.name} computed something else in the backward pass (checksum {now:.6g}) than "
            f"in the forward pass ({before:.6g}): "
        )
        for i, (had, given) in enumerate(zip(self.inputs, sums_of(inputs), strict=True)):
            if not _close(float(had), float(given)):
                name = argument_name(unit.original, tree, i)
                raise MisusedModel(
                    f"{differs}its argument {name} was written to in between or by the block, in "
                    "a way that torch does not count (.data, .numpy()), and what was there is "
                    f"gone. Where it is written to, {new_tensor(name)} instead, or hand the "
                    "block a copy (.clone())"
                )
        raise MisusedModel(
            f"{differs}was it switched between train and eval, or were adapters toggled, in "
            "between? Keep the model as it is from forward to backward. Or does it draw from a "
            "random generator of its own (torch.Generator, numpy's default_rng)? Only the global "
            "ones of torch, numpy and Python are set back to draw the same again: use these"
        )


def sums_of(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return a scalar (float64) a tensor that changes when the tensor does; 0 where unsupported."""
    return [_sum_of(tensor.detach()) for tensor in tensors]


def checksum(outputs: Sequence[Tensor]) -> Tensor:
    """Return a scalar (float64) that changes when any output does."""
    floats = [_norm_of(o.detach()) for o in outputs if o.is_floating_point()]
    return torch.stack(floats).sum() if floats else torch.zeros((), dtype=torch.float64)


def _norm_of(tensor: Tensor) -> Tensor:
    """Compute the norm in fp32, for which a GPU reads 16-bit values directly: for float64 torch
    would first make a copy four times as large as the tensor."""
    dtype = torch.promote_types(tensor.dtype, torch.float32)
    norm: Tensor = torch.linalg.vector_norm(tensor, 1, dtype=dtype)
    return norm.double()


def _sum_of(tensor: Tensor) -> Tensor:
    if tensor.layout != torch.strided or tensor.is_complex():
        return torch.zeros((), dtype=torch.float64)
    if tensor.is_floating_point():
        return checksum([tensor])
    return tensor.sum(dtype=torch.float64)


def _close(before: float, now: float) -> bool:
    return not abs(before - now) > _TOLERANCE * max(abs(before), 1e-6)
