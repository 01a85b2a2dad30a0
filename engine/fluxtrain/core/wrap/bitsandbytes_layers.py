"""Models that bitsandbytes has quantised: their codes are taken over as they are.

Its linear layers (4 bit: `Linear4bit` with nf4 in blocks of 64; 8 bit: `Linear8bitLt`) become
ordinary ones for the time that the model is wrapped: their weight is a packed parameter, which a
block's computation sees unpacked, and their forward is a plain product. Of LLM.int8() the weights
alone are taken: outliers of the inputs need no path of their own, as the product is in 16 bits.
bitsandbytes itself is not imported: a model that has its layers brings it.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from fluxtrain.core.memory.group import Group
from fluxtrain.core.memory.packed import PackedSource, without_values
from fluxtrain.core.quantization.layout import BLOCK, NESTED
from fluxtrain.errors import UnsupportedModel

_LAYER = "_fluxtrain_layer"  # attribute of a packed parameter: the layer that it was taken from
_NOTHING = torch.empty(0)


class _Layer:
    """A layer of bitsandbytes with its own weight, whose arrays are given up meanwhile."""

    def __init__(self, module: Any) -> None:
        self.module, self.weight = module, module.weight
        self.device = self.weight.device

    def take(self, source: PackedSource) -> None:
        """Put a packed parameter in the place of the layer's weight."""
        made = nn.Parameter(without_values(source.shape, source.dtype), requires_grad=False)
        made.__dict__.update({"_fluxtrain_packed": source, _LAYER: self})
        self.module._parameters["weight"] = made
        self.module.__dict__["forward"] = MethodType(_forward, self.module)
        self._set(_NOTHING.to(torch.uint8), _NOTHING, None)

    def give_back(self, arrays: Mapping[str, Tensor]) -> None:
        """Put the layer's own weight back, with its codes and scales (clones of `arrays`)."""
        own = {name: array.clone().to(self.device) for name, array in arrays.items()}
        shape = self.module._parameters["weight"].shape
        if "scales" in own or hasattr(self.weight, "quant_state"):
            self._set(own["codes"].view(-1, 1), own["absmax"], own.get("scales"))
        else:
            self._set(own["codes"].view(shape), own["absmax"], None)
        self.module._parameters["weight"] = self.weight
        self.module.__dict__.pop("forward", None)

    def _set(self, codes: Tensor, absmax: Tensor, scales: Tensor | None) -> None:
        state = getattr(self.weight, "quant_state", None)
        if state is not None:
            self.weight.data, state.absmax = codes, absmax
            if state.nested and scales is not None:
                state.state2.absmax = scales
            return
        self.weight.data = codes
        holder = self.module.state if self.weight.SCB is None else self.weight
        holder.CB, holder.SCB = codes, absmax


def take_over_quantised(model: nn.Module) -> None:
    """Make the layers of bitsandbytes in `model` ordinary ones with packed weights, in place.

    Raises UnsupportedModel for another format, or a layer that `.to()` has changed.
    """
    layers = [(name, module) for name, module in model.named_modules() if _is_quantised(module)]
    dtype = _usual_dtype(model) if layers else torch.float16
    sources = [(module, _source_of(name, module, dtype)) for name, module in layers]
    for module, source in sources:  # after all of them: a refusal leaves the model as it was
        _Layer(module).take(source)


def give_back_quantised(group: Group) -> bool:
    """Give the layers of a group that were taken over their own weights back; return whether all
    its packed weights were theirs."""
    every = True
    for segment in group.packed_segments:
        layout, weights = segment.packed, segment.stored_weights()
        assert layout is not None
        for index, member in enumerate(segment.members):
            layer: _Layer | None = member.parameter.__dict__.get(_LAYER)
            if layer is not None:
                layer.give_back(layout.arrays_of(index, weights))
            every = every and layer is not None
    return every


def _forward(self: Any, x: Tensor) -> Tensor:
    """Multiply by the unpacked weight, in its dtype, as the layer's own forward does."""
    weight, bias = self.weight, self.bias
    added = None if bias is None else bias.to(weight.dtype)
    return nn.functional.linear(x.to(weight.dtype), weight, added).to(x.dtype)


def _is_quantised(module: nn.Module) -> bool:
    return type(module._parameters.get("weight")).__name__ in ("Params4bit", "Int8Params")


def _usual_dtype(model: nn.Module) -> torch.dtype:
    """Find the dtype of 16 bits that 8-bit layers compute in: that of the other weights."""
    half = (torch.bfloat16, torch.float16)
    return next((p.dtype for p in model.parameters() if p.dtype in half), torch.float16)


def _source_of(name: str, module: Any, dtype: torch.dtype) -> PackedSource:
    weight = module.weight
    if type(weight).__name__ == "Int8Params":
        return _source_of_8_bits(name, weight, module, dtype)
    state = weight.quant_state
    if state is None or not weight.bnb_quantized:
        raise UnsupportedModel(
            f"{name} is a 4-bit layer of bitsandbytes whose weight is not quantised yet: move the "
            "model to the GPU first, or load it unquantised and call "
            'fluxtrain.wrap(model, frozen="nf4")'
        )
    if state.quant_type != "nf4" or state.blocksize != BLOCK:
        raise UnsupportedModel(
            f"{name} is quantised as {state.quant_type} in blocks of {state.blocksize}: nf4 in "
            f"blocks of {BLOCK} can be taken over; load it with bnb_4bit_quant_type='nf4', or "
            'unquantised with fluxtrain.wrap(model, frozen="nf4")'
        )
    codes = weight.data.contiguous().view(torch.uint8).reshape(-1)
    _check(name, len(codes) == -(-state.shape.numel() // 2) and state.absmax is not None)
    arrays = {"codes": codes, "absmax": state.absmax.reshape(-1)}
    if not state.nested:
        return PackedSource("nf4", tuple(state.shape), state.dtype, arrays)
    _check(name, state.state2.blocksize == NESTED)
    scales = state.state2.absmax.float().reshape(-1)
    offset = torch.as_tensor(state.offset).float().reshape(1).expand(len(scales))
    arrays |= {"scales": scales, "offsets": offset, "map": state.state2.code.float()}
    return PackedSource("nf4-double", tuple(state.shape), state.dtype, arrays)


def _source_of_8_bits(name: str, weight: Any, module: Any, dtype: torch.dtype) -> PackedSource:
    state = module.state
    codes = weight.CB if weight.CB is not None else (state.CB if state.CB is not None else weight)
    scales = weight.SCB if weight.SCB is not None else state.SCB
    _check(name, codes.dtype == torch.int8 and scales is not None)
    arrays = {"codes": codes.detach().contiguous().reshape(-1), "absmax": scales.reshape(-1)}
    return PackedSource("int8", tuple(codes.shape), dtype, arrays)


def _check(name: str, holds: bool) -> None:
    if not holds:
        raise UnsupportedModel(
            f"the quantised weight of {name} has lost part of itself, as .to(dtype) or a copy of "
            "its data alone does to layers of bitsandbytes: load the model again, and leave "
            "moving it to FluxTrain"
        )
