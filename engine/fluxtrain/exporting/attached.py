"""An adapter beside the layers of its base, without the base's weights: peft's own classes merge
one layer at a time, with weights that are put into it for as long as that takes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from peft import get_peft_model
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.save_and_load import load_peft_weights, set_peft_model_state_dict
from torch import Tensor, nn
from transformers import PreTrainedModel

from fluxtrain.errors import BadInput
from fluxtrain.exporting.adapter_config import peft_refusals
from fluxtrain.exporting.asked_tensors import base_name, of_another_base, refuse_other_tensors
from fluxtrain.exporting.source import AdapterSource
from fluxtrain.models.quiet import quiet_peft
from fluxtrain.plan.states import StorageFormat
from fluxtrain.reporting.failures import as_told
from fluxtrain.wrapping.block_discovery import take_apart
from fluxtrain.wrapping.grouping import group_parameters

Read = Callable[[str], Tensor]  # a weight of the base by its parameter's name


class Attached:
    """An adapter in fp32 on the layers of an empty base."""

    def __init__(self, model: nn.Module, packed: frozenset[str], given: frozenset[str]) -> None:
        """model: peft's, with adapters loaded; packed: parameters of the base that were packed in
        training; given: names in `model` of weights of the base that the adapter's file holds."""
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
        """The parameters of the base that the adapter changes, in the model's order."""
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
                    f"{name} cannot be merged: {told}: use the adapter beside its base"
                ) from error
            found: Tensor = getattr(layer.get_base_layer(), own).detach()
            layer.merged_adapters.clear()
            return found

    def outputs(self, name: str, read: Read, inputs: int) -> tuple[Tensor, Tensor, Tensor] | None:
        """Return random inputs of the layer with parameter `name`, and its outputs without and with
        the adapter, in fp32; None for layers other than linear ones and embeddings."""
        with self._filled(name, read) as (layer, _), torch.no_grad():
            base: Any = layer.get_base_layer()
            draw = torch.Generator().manual_seed(0)
            if isinstance(base, nn.Embedding):
                x = torch.randint(base.num_embeddings, (4 * inputs,), generator=draw)
            elif base.weight.dim() == 2:
                first = isinstance(base, nn.Linear)  # Conv1D keeps (in, out)
                x = torch.randn(inputs, base.weight.shape[1 if first else 0], generator=draw)
            else:
                return None
            module: Any = layer
            return x, base(x), module.eval()(x)

    def _is_changed(self, name: str) -> bool:
        """A bias is changed by adapters with a bias of their own alone."""
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
    """Put the adapter beside the layers of `empty`, the base on the meta device, in place.

    storage: how the large frozen weights of the base's blocks were stored in training.
    Raises BadInput where the adapter is of another base.
    """
    stored = load_peft_weights(str(source.folder), device="cpu")
    own = {name for name, _ in empty.named_parameters(remove_duplicate=False)}
    with peft_refusals(source.folder), quiet_peft():
        try:
            model: Any = get_peft_model(
                empty, source.config, autocast_adapter_dtype=False, low_cpu_mem_usage=True
            )
        except ValueError as error:  # target modules that are not there
            raise of_another_base(source.folder, str(error).splitlines()[0]) from error
    shapes = {name: tuple(tensor.shape) for name, tensor in stored.items()}
    refuse_other_tensors(source.weights, model, shapes, own)
    packed = frozenset[str]()
    if storage != "plain":
        for parameter in model.parameters():
            parameter.requires_grad_(requires_grad=False)
        groups, _ = group_parameters(model, take_apart(model), frozen=storage)
        packed = frozenset(
            base_name(f"{group.name}.{member.name}")
            for group in groups.values()
            for segment in group.segments
            if segment.storage != "plain"
            for member in segment.members
        )
    _give_memory(model)
    was = dict(model.named_parameters(remove_duplicate=False))
    with quiet_peft():
        set_peft_model_state_dict(model, dict(stored), low_cpu_mem_usage=True)
    given = frozenset(
        name
        for name, parameter in model.named_parameters(remove_duplicate=False)
        if parameter is not was.get(name) and base_name(name) in own
    )
    return Attached(model, packed, given)


def _to_fp32(layer: BaseTunerLayer) -> None:
    """Let an adapter be in fp32; peft has given it the dtype of weights that its file holds."""
    for name in (*layer.adapter_layer_names, *layer.other_param_names):
        part = getattr(layer, name, None)
        if isinstance(part, nn.Module):
            part.float()


def _give_memory(model: nn.Module) -> None:
    """Let every tensor be on the CPU, with the memory of one element: peft moves loaded adapters to
    where the layer beside them is."""
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
