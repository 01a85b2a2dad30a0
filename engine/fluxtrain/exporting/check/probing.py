"""Compares each merged weight, read back from its file, with its layer and the adapter beside it.

Logits cannot tell that one layer of hundreds was left out: its share of them is below what rounding
does. Its own outputs can.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from fluxtrain.exporting.attached import Attached
from fluxtrain.exporting.base_files import BaseFiles
from fluxtrain.exporting.check.agreement import LayerAgreement, layer_agreement
from fluxtrain.exporting.trained_base import TrainedBase

INPUTS = 32


@dataclass(frozen=True, kw_only=True)
class Probed:
    """All layers that were compared."""

    layers: tuple[LayerAgreement, ...]

    @property
    def wrong(self) -> tuple[LayerAgreement, ...]:
        """Those that differ by more than rounding does, worst first."""
        found = (layer for layer in self.layers if not layer.agrees)
        return tuple(sorted(found, key=lambda layer: -layer.difference / layer.limit))

    @property
    def worst(self) -> LayerAgreement | None:
        """The layer that is nearest to its limit, or beyond it."""
        return max(self.layers, key=lambda layer: layer.difference / layer.limit, default=None)

    @property
    def kept(self) -> float:
        """How much of the adapter's change the merged weights hold; 1 is all of it. Layers count by
        the change that they make."""
        total = sum(layer.change**2 for layer in self.layers)
        held = sum(layer.kept * layer.change**2 for layer in self.layers)
        return held / total if total else 1.0


def probe(
    attached: Attached, onto: TrainedBase, merged: BaseFiles, tell: Callable[[int, int], None]
) -> Probed:
    """Compare every layer that the adapter changes with its weight in the files of `merged`."""
    layers: list[LayerAgreement] = []
    for done, name in enumerate(attached.layers):
        tell(done, len(attached.layers))
        if name.endswith(".bias"):
            continue
        told = attached.outputs(name, onto.read, INPUTS)
        if told is None:
            continue
        stored = merged.stored_name(name)
        assert stored is not None, name
        x, base, expected = told
        weight = merged.tensor(stored)
        bias_name = merged.stored_name(name.removesuffix("weight") + "bias")
        bias = merged.tensor(bias_name).float() if bias_name else None
        found = _output(attached, name, x, weight.float(), bias)
        layers.append(layer_agreement(name, base, expected, found, weight.dtype))
    return Probed(layers=tuple(layers))


def _output(
    attached: Attached, name: str, x: Tensor, weight: Tensor, bias: Tensor | None
) -> Tensor:
    layer = attached.layers[name].get_base_layer()
    if isinstance(layer, nn.Embedding):
        return functional.embedding(x, weight)
    with torch.no_grad():
        return functional.linear(x, weight if isinstance(layer, nn.Linear) else weight.T, bias)
