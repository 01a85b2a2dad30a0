"""Puts an adapter on its base, by peft: a loaded one to compute, or an empty one to merge.

Merging needs no weights of the base at once: peft's own classes merge one layer at a time, with
weights that are put into it for as long as that takes.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from peft import get_peft_model
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.save_and_load import load_peft_weights, set_peft_model_state_dict
from torch import Tensor, nn
from transformers import PreTrainedModel

from fluxtrain.core.wrap.block_discovery import take_apart
from fluxtrain.core.wrap.grouping import group_parameters
from fluxtrain.errors import BadInput
from fluxtrain.machine.failures import as_told
from fluxtrain.models.model_files import safetensors_header
from fluxtrain.models.quiet import quiet_peft
from fluxtrain.plan.states import StorageFormat
from fluxtrain.results.adapter.refusals import base_name, peft_refusals, refuse_left_out
from fluxtrain.results.adapter.source import WEIGHTS, AdapterSource

Read = Callable[[str], Tensor]  # a weight of the base by its parameter's name


class Attached:
    """An adapter in fp32 on the layers of an empty base."""

    def __init__(self, model: nn.Module, packed: frozenset[str], given: frozenset[str]) -> None:
        """Hold peft's `model`, with adapters loaded.

        packed: parameters of the base that were packed in training; given: names in `model` of
        weights of the base that the adapter's file holds.
        """
        self.packed = packed
        self.layers: dict[str, BaseTunerLayer] = {}  # by the parameter that they change
        self.given: dict[str, Tensor] = {}  # weights that take the place of the base's
        for path, module in model.named_modules():
            if isinstance(module, BaseTunerLayer):
                _to_fp32(module)
                for name, _ in module.get_base_layer().named_parameters(recurse=False):
                    self.layers[base_name(f"{path}.base_layer.{name}")] = module
        for name, parameter in model.named_parameters(remove_duplicate=False):
            if name in given:
                self.given[base_name(name)] = parameter.detach()

    @property
    def changed(self) -> list[str]:
        """Return the parameters of the base that the adapter changes, in the model's order."""
        adapted = (name for name in self.layers if self._is_changed(name))
        return list(dict.fromkeys([*adapted, *self.given]))

    def merged(self, name: str, read: Read) -> Tensor:
        """Return parameter `name` of the base with the adapter in it, in fp32.

        Raises BadInput where the result is not finite, or peft merges no such adapter.
        """
        if name not in self.layers or not self._is_changed(name):
            return self.given[name].float() if name in self.given else read(name).float()
        with self._filled(name, read) as (layer, own):
            try:
                layer.merge(safe_merge=True)
            except (ValueError, NotImplementedError, RuntimeError) as error:
                if as_told(error) is not None:  # no memory
                    raise
                told = str(error) or "peft has no way to do it"
                raise BadInput(
                    f"{name} cannot be merged: {told}: use the adapter with its base"
                ) from error
            found: Tensor = getattr(layer.get_base_layer(), own).detach()
            layer.merged_adapters.clear()
            return found

    def _is_changed(self, name: str) -> bool:
        """Return whether the adapter changes a parameter: a bias only where the adapter has its
        own."""
        layer: Any = self.layers[name]
        return not name.endswith(".bias") or any(getattr(layer, "lora_bias", {}).values())

    @contextmanager
    def _filled(self, name: str, read: Read) -> Iterator[tuple[BaseTunerLayer, str]]:
        """Put the base's weights into the layer of parameter `name` for a while."""
        layer = self.layers[name]
        base = layer.get_base_layer()
        path, _, own = name.rpartition(".")
        empty = dict(base.named_parameters(recurse=False))
        for key in empty:
            full = f"{path}.{key}"
            values = self.given[full] if full in self.given else read(full)
            base._parameters[key] = nn.Parameter(values.float(), requires_grad=False)
        try:
            yield layer, own
        finally:
            base._parameters.update(empty)


def attach(source: AdapterSource, empty: PreTrainedModel, storage: StorageFormat) -> Attached:
    """Add the adapter to the layers of `empty`, the base on the meta device, in place.

    storage: how the large frozen weights of the base's blocks were stored in training. Raises
    BadInput where the adapter does not fit the base, before any tensor is made.
    """
    own = _names(empty)
    with peft_refusals(source.folder), quiet_peft():
        # All tensors of LoRA are in its file. Other kinds make some, which must be real.
        with torch.device("meta") if source.config.peft_type == "LORA" else nullcontext():
            model = _injected(source, empty, low_cpu_mem_usage=True)
        packed = _packed(model, storage)
        _give_memory(model)
        was = dict(model.named_parameters(remove_duplicate=False))
        _load(source.folder, model, own, assign=True)
    given = frozenset(
        name
        for name, parameter in model.named_parameters(remove_duplicate=False)
        if parameter is not was.get(name) and base_name(name) in own
    )
    return Attached(model, packed, given)


def put_beside(source: AdapterSource, model: nn.Module, folder: Path | None = None) -> nn.Module:
    """Add the adapter, or its weights in another `folder`, to a loaded base, in place.

    Adapters in fp32 keep it, and are trainable, so they are never packed with the frozen weights.
    Raises BadInput where peft cannot load it, or would leave some of its tensors out.
    """
    own = _names(model)
    with peft_refusals(source.folder), quiet_peft():
        adapted = _injected(source, model, autocast_adapter_dtype=_is_fp32(source))
        _load(folder or source.folder, adapted, own)
    return adapted


def _injected(source: AdapterSource, model: Any, **options: Any) -> nn.Module:
    config = copy.copy(source.config)  # peft writes the model's name into it
    config.inference_mode = False
    options = {"autocast_adapter_dtype": False, **options}
    made: nn.Module = get_peft_model(model, config, **options)
    return made


def _load(folder: Path, model: nn.Module, own: Collection[str], *, assign: bool = False) -> None:
    """Load an adapter's tensors strictly; `assign`: in place of those of a model without memory."""
    stored = load_peft_weights(str(folder), device="cpu")
    loaded = set_peft_model_state_dict(model, dict(stored), low_cpu_mem_usage=assign)
    refuse_left_out(folder / WEIGHTS, model, loaded, own)


def _names(model: nn.Module) -> frozenset[str]:
    return frozenset(name for name, _ in model.named_parameters(remove_duplicate=False))


def _packed(model: nn.Module, storage: StorageFormat) -> frozenset[str]:
    """Return the names in the base of the parameters that training has packed."""
    if storage == "plain":
        return frozenset()
    groups, _ = group_parameters(model, take_apart(model), frozen=storage)
    return frozenset(
        base_name(f"{group.name}.{member.name}")
        for group in groups.values()
        for segment in group.segments
        if segment.storage != "plain"
        for member in segment.members
    )


def _is_fp32(source: AdapterSource) -> bool:
    header = safetensors_header(source.weights)
    return any(one["dtype"] == "F32" for one in header.values())


def _to_fp32(layer: BaseTunerLayer) -> None:
    """Let an adapter be in fp32; peft has given it the dtype of weights that its file holds."""
    for name in (*layer.adapter_layer_names, *layer.other_param_names):
        part = getattr(layer, name, None)
        if isinstance(part, nn.Module):
            part.float()


def _give_memory(model: nn.Module) -> None:
    """Put every tensor on the CPU with the memory of one element: peft moves loaded adapters to
    the device of their layer."""
    made: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and parameter.is_meta:
                values = torch.zeros(()).expand(parameter.shape)
                known = made.setdefault(id(parameter), nn.Parameter(values, requires_grad=False))
                module._parameters[name] = known
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.is_meta:
                empty = torch.zeros((), dtype=buffer.dtype).expand(buffer.shape)
                module._buffers[name] = empty
