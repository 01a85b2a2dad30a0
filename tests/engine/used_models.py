"""Trained models in use, for the tests of evaluating and generating; and the plain ones beside."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, PreTrainedModel

from fluxtrain.core.wrap.block_discovery import take_apart
from fluxtrain.core.wrap.grouping import group_parameters
from fluxtrain.methods.trained_on import TrainedOn
from fluxtrain.models.model_files import base_key, check_model_folder
from fluxtrain.plan.states import StorageFormat
from fluxtrain.results.export.base_files import dequantised
from fluxtrain.results.opened import ModelRequest, OpenedModel, open_model
from tests.engine.adapter_folders import make_adapter


@contextmanager
def opened(named: Path | str, **settings: Any) -> Iterator[OpenedModel]:
    """Open a model on the CPU, for a while."""
    made = open_model(
        ModelRequest(named=str(named), **{"device": "cpu", **settings}), lambda _: None
    )
    try:
        yield made
    finally:
        made.close()


def plain(folder: Path) -> PreTrainedModel:
    """The model as transformers alone loads it."""
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    return model.eval()


def plain_with_adapter(
    base: Path, adapter: Path, dtype: torch.dtype, storage: StorageFormat = "plain"
) -> Any:
    """Base and adapter as peft alone loads them, the base's weights packed and unpacked."""
    model = AutoModelForCausalLM.from_pretrained(base, dtype=dtype)
    model.requires_grad_(False)
    groups, _ = group_parameters(model, take_apart(model), frozen=storage)
    for group in groups.values():
        for segment in group.segments:
            for member in segment.members if segment.storage != "plain" else ():
                weight = member.parameter
                weight.data = dequantised(weight.data, storage, member.name).clone()
    adapted: Any = PeftModel.from_pretrained(model, str(adapter), autocast_adapter_dtype=False)
    return adapted.get_base_model().eval()


def trained_adapter(base: Path, to: Path, dtype: torch.dtype, storage: StorageFormat) -> Path:
    """Write an adapter that says how its base was kept in training, as a run does."""
    make_adapter(base, to)
    path = to / "adapter_model.safetensors"
    told = TrainedOn(
        dtype=str(dtype).removeprefix("torch."),
        storage=storage,
        key=base_key(check_model_folder(base).weights),
    )
    tensors = {name: tensor.to(dtype) for name, tensor in load_file(path).items()}
    save_file(tensors, path, metadata={"format": "pt", **told.metadata()})
    return to


def greedy(model: Any, prompts: Sequence[Sequence[int]], tokens: int) -> list[list[int]]:
    """What transformers alone writes: each prompt's new tokens up to the end."""
    longest = max(map(len, prompts))
    padding = [[0] * (longest - len(prompt)) for prompt in prompts]
    ids = torch.tensor([[*pad, *prompt] for pad, prompt in zip(padding, prompts, strict=True)])
    mask = torch.tensor(
        [[0] * len(pad) + [1] * len(prompt) for pad, prompt in zip(padding, prompts, strict=True)]
    )
    found = model.generate(
        input_ids=ids, attention_mask=mask, max_new_tokens=tokens, do_sample=False, pad_token_id=0
    )
    rows = found[:, longest:].tolist()
    return [row[: row.index(0)] if 0 in row else row for row in rows]
