"""The plan of a run: facts of its model and of this machine, handed to the placement rule."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from fluxtrain.hardware.device import check_accelerator
from fluxtrain.hardware.machine import Machine
from fluxtrain.plan.footprint import ModelFacts, activation_row_estimate
from fluxtrain.plan.placement import Placement, Room, Wishes, place
from fluxtrain.stream.blocks import take_apart
from fluxtrain.telemetry.events import ChoiceMade
from fluxtrain.train.config import RunConfig
from fluxtrain.units import GIB


def choose_device(config: RunConfig) -> ChoiceMade:
    """cpu or cuda, with the reason.

    Raises:
        BadInput: a GPU is here that torch cannot use, or one was asked for and there is none.
    """
    return check_accelerator(
        torch.cuda.is_available(),
        config.placement.device,
        torch_cuda_version=torch.version.cuda,
    )


def model_facts(model: nn.Module, config: Any, sequence_length: int) -> ModelFacts:
    """Sizes of a causal language model, also of one on the meta device.

    `config` is its Hugging Face configuration.
    """
    parts = take_apart(model)
    counted: set[int] = set()
    blocks = tuple(_new_bytes(block, counted) for _, block in parts.blocks)
    edges = _new_bytes(model, counted)
    text = config.get_text_config()
    hidden = int(text.hidden_size)
    dtype_bytes = max(p.element_size() for p in model.parameters() if p.is_floating_point())
    return ModelFacts(
        block_bytes=blocks,
        edge_bytes=edges,
        trained_parameters=sum(p.numel() for p in model.parameters() if p.requires_grad),
        dtype_bytes=dtype_bytes,
        activation_row_bytes=activation_row_estimate(hidden, sequence_length, dtype_bytes),
        hidden=hidden,
        vocabulary=int(text.vocab_size),
        sequence_length=sequence_length,
    )


def decide(
    config: RunConfig,
    facts: ModelFacts,
    machine: Machine,
    device: str,
    *,
    batch_rows: int | None,
    data_rows: int | None,
) -> Placement:
    """Where the bytes go and how many rows a step takes.

    `batch_rows` None leaves it to the rule; `data_rows` are those of one epoch.

    Raises:
        DoesNotFit: no layout does; says what it needs and what there is.
    """
    wished = config.placement
    free = torch.cuda.mem_get_info()[0] if device == "cuda" else None
    return place(
        facts,
        Room(device_free_bytes=free, host_available_bytes=machine.memory_available_bytes),
        Wishes(
            offload=wished.offload,
            batch_rows=batch_rows,
            chunk_rows=None if wished.chunk_rows == "auto" else wished.chunk_rows,
            budget_bytes=None if wished.budget_gib is None else int(wished.budget_gib * GIB),
            data_rows=data_rows,
        ),
    )


def choices_of(placement: Placement) -> tuple[ChoiceMade, ...]:
    """The placement's choices as an event tells them."""
    return tuple(
        ChoiceMade(name=name, value=choice.value, because=choice.because)
        for name, choice in placement.choices.items()
    )


def _new_bytes(module: nn.Module, counted: set[int]) -> int:
    """Bytes of the parameters that were not counted before; they are counted now."""
    total = 0
    for parameter in module.parameters():
        if id(parameter) not in counted:
            counted.add(id(parameter))
            total += parameter.numel() * parameter.element_size()
    return total
