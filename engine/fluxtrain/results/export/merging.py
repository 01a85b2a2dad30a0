"""Writes a base with an adapter in its weights: tensor by tensor, from mapped files."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fluxtrain.errors import BadInput
from fluxtrain.models.beside import (
    TEMPLATE,
    TEMPLATES,
    copy_beside,
    files_beside,
    spell_tokenizer,
    untied,
)
from fluxtrain.models.spelling import model_in_both
from fluxtrain.models.tensor_files import SHARD_BYTES, PlannedTensor, planned_shards, write_model
from fluxtrain.results.adapter.attached import Attached
from fluxtrain.results.export.agreement import RoundedWeight, rounded_weight
from fluxtrain.results.export.base_files import BaseFiles, TrainedBase

_OF_TRAINING = (TEMPLATE, "generation_config.json")  # better than the base's
_WEIGHT_SUFFIXES = (
    ".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".h5", ".msgpack", ".onnx",
    ".index.json",
)  # fmt: skip
_OF_THE_ADAPTER = ("adapter_config.json", "adapter_model.safetensors", "README.md")


@dataclass(frozen=True, kw_only=True)
class Merge:
    """The parts of a merged model."""

    attached: Attached
    onto: TrainedBase  # the weights that the adapter is added to
    adapter: Path  # its folder, for chat template and generation settings
    dtype: torch.dtype | None  # of all floating-point weights; None: the base's own
    measured: bool = True  # compare what is written with the sum in fp32
    rounded: list[RoundedWeight] = field(default_factory=list)  # of the weights written so far

    @cached_property
    def _changed(self) -> frozenset[str]:
        return frozenset(self.attached.changed)

    @property
    def base(self) -> BaseFiles:
        """Return the files of the base."""
        return self.onto.base

    def check(self) -> None:
        """Raise BadInput where a weight that the adapter changes is not one tensor of the files."""
        for name in self.attached.changed:
            if name in self.base.converted or self.base.stored_name(name) is None:
                raise BadInput(
                    f"the adapter changes {name}, which loading makes of several tensors of "
                    f"{self.base.files.folder}: merge it with peft's merge_and_unload, with the "
                    "whole model in memory"
                )
        for name in sorted(self.base.converted):
            if self.onto.is_packed(name):
                raise BadInput(
                    f"training packed {name} as one, and the files of {self.base.files.folder} "
                    "hold it in several tensors, which packing each alone would make others of: "
                    "use --onto original, or the adapter with its base"
                )

    def tensors(self) -> Iterator[tuple[PlannedTensor, str]]:
        """Yield each tensor to write with the name of its parameter, in the order of the files."""
        for name, parameter in self.base.parameters.items():
            stored = self.base.stored[name]
            yield PlannedTensor(name, self._dtype_of(stored.dtype), stored.shape), parameter
        for parameter, twin in self._untied.items():
            stored = self.base.stored[twin]
            yield PlannedTensor(parameter, self._dtype_of(stored.dtype), stored.shape), parameter

    @property
    def size_bytes(self) -> int:
        """Count the bytes of all tensors to write."""
        return sum(tensor.size_bytes for tensor, _ in self.tensors())

    def weight(self, tensor: PlannedTensor, parameter: str) -> Tensor:
        """Return the tensor to write."""
        if parameter in self._changed:
            merged = self.attached.merged(parameter, self.onto.read)
            made = _converted(merged, tensor)
            if self.measured and parameter in self.attached.layers and merged.dim() > 1:
                base = self.onto.read(parameter)
                self.rounded.append(rounded_weight(tensor.name, base, merged, made))
            return made
        known = tensor.name in self.base.shards
        name = tensor.name if known else self.base.stored_name(parameter)
        assert name is not None, parameter
        return _converted(self.onto.of(self.base.tensor(name), parameter), tensor)

    def write(self, folder: Path, tell: Callable[[int, int], None]) -> None:
        """Write weights, index, configuration and all other files of the base into `folder`.

        tell: called with how many tensors are written, and of how many.
        """
        found = dict(self.tensors())
        done = 0

        def make(tensor: PlannedTensor) -> Tensor:
            nonlocal done
            tell(done, len(found))
            done += 1
            return self.weight(tensor, found[tensor])

        write_model(folder, planned_shards(found, SHARD_BYTES), make)
        carry_over(self.base.files.folder, self.adapter, folder)
        spell_tokenizer(folder)
        is_untied = bool(self._untied) or self._stored_apart
        _write_config(folder, self.base.files.config, self.stated_dtype, is_untied)

    def _dtype_of(self, stored: str) -> torch.dtype:
        """Return what a tensor stored in a dtype is written in. Under `None` those stored as most
        are become what training had, and odd ones stay."""
        dtype: torch.dtype = getattr(torch, stored)
        if not dtype.is_floating_point:
            return dtype
        if self.dtype is not None:
            return self.dtype
        return self.onto.dtype if stored == self.base.files.dtype else dtype

    @property
    def stated_dtype(self) -> str:
        """Return the dtype of most weights, as torch names it."""
        return str(self.dtype or self.onto.dtype).removeprefix("torch.")

    @cached_property
    def _untied(self) -> dict[str, str]:
        """Return the parameters that get a tensor of their own, as the adapter changes one of tied
        ones in another way than the rest; each with the stored tensor that it had."""
        extra: dict[str, str] = {}
        stored = set(self.base.parameters.values())
        for names in self.base.tied:
            twin = self.base.stored_name(names[0])
            if twin is None or not any(name in self._changed for name in names):
                continue
            if not self._stay_equal(names):
                extra |= {name: twin for name in names if name not in stored}
        return extra

    @property
    def _stored_apart(self) -> bool:
        """Do the files hold several tensors that differ for parameters that should be one?"""
        for tied in self.base.tied:
            names = [name for name, own in self.base.parameters.items() if own in tied]
            stored = [self.base.tensor(name) for name in names]
            if not all(torch.equal(stored[0], other) for other in stored[1:]):
                return True
        return False

    def _stay_equal(self, names: tuple[str, ...]) -> bool:
        if any(name not in self._changed for name in names):
            return False
        first, *others = (self.attached.merged(name, self.onto.read) for name in names)
        return all(torch.equal(first, other) for other in others)


def _converted(weight: Tensor, tensor: PlannedTensor) -> Tensor:
    """Return the weight in the dtype to write; raise BadInput where that has no room for it."""
    made = weight.to(tensor.dtype)
    narrow = made.dtype == torch.float16 and weight.dtype != torch.float16
    if narrow and not bool(torch.isfinite(made).all()):
        largest = float(weight.abs().max())
        raise BadInput(
            f"{tensor.name} holds {largest:.3g}, and float16 goes to 65504: use --dtype bf16"
        )
    return made


def carry_over(base: Path, adapter: Path, folder: Path) -> None:
    """Copy into `folder` a base's files other than weights; and from the adapter's folder the chat
    template, the generation settings (with the trained ends), and files that the base lacks."""
    chosen = (adapter / TEMPLATE).exists()  # with it, the adapter has all templates
    for path in files_beside(base):
        if _is_carried(path.name) and not (chosen and path.parent.name == TEMPLATES):
            copy_beside(path, base, folder)
    for path in files_beside(adapter):
        lacking = not (folder / path.relative_to(adapter)).exists() or path.name in _OF_TRAINING
        if lacking and _is_carried(path.name):
            copy_beside(path, adapter, folder)


def _is_carried(name: str) -> bool:
    return not (name.startswith(".") or name.endswith(_WEIGHT_SUFFIXES) or name in _OF_THE_ADAPTER)


def _write_config(folder: Path, config: Mapping[str, Any], dtype: str, is_untied: bool) -> None:
    """Write config.json of the base, with the dtype that was written, and untied where it is."""
    made = untied(config) if is_untied else dict(config)
    for part in [made, *(value for value in made.values() if isinstance(value, dict))]:
        for key in ("dtype", "torch_dtype"):
            if key in part:
                part[key] = dtype
    made = model_in_both(made, {}, dtype)
    text = json.dumps(made, indent=2, ensure_ascii=False) + "\n"
    (folder / "config.json").write_text(text, encoding="utf-8")
