"""Refuse models that `wrap` cannot take before it touches them, each with the cure."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from fluxtrain.errors import BadInput, UnsupportedModel
from fluxtrain.memory.group import Group
from fluxtrain.plan.states import LEAST_PACKED


def refuse_other_objects(model: object) -> None:
    """Raise BadInput for what is no model."""
    if not isinstance(model, nn.Module):
        raise BadInput(f"wrap takes a torch.nn.Module, not {type(model).__name__}")


def refuse_unsupported(model: nn.Module) -> None:
    """Raise UnsupportedModel for a model that `wrap` cannot take."""
    for name, parameter in model.named_parameters():
        if parameter.is_meta:
            raise UnsupportedModel(
                f"{name} has no data (meta device: accelerate's offload, or an empty "
                "initialisation): load the weights first, without device_map"
            )
        if parameter.is_inference():
            raise UnsupportedModel(
                f"{name} was made in torch.inference_mode and can never be trained: make or load "
                "the model outside of it"
            )
        if type(parameter) is not nn.Parameter:
            raise UnsupportedModel(
                f"{name} is a {type(parameter).__name__}: tensor subclasses (quantised, "
                "distributed) are not supported yet"
                + (
                    "; part of this model is wrapped already"
                    if "_fluxtrain" in vars(parameter)
                    else ""
                )
            )
    _refuse_sparse(model)


def wide_frozen_weights(groups: Iterable[Group]) -> str:
    """Say that most of the blocks' frozen weights are in fp32 beside adapters; empty otherwise.

    peft's `prepare_model_for_kbit_training` casts every weight that is not packed to fp32.
    """
    blocks = [group for group in groups if group.kind == "block"]
    frozen = [m for group in blocks for m in group.members if not m.trained]
    wide = sum(m.count for m in frozen if m.segment.dtype == torch.float32)
    count = sum(m.count for m in frozen)
    trained = sum(group.trained_count for group in blocks)
    if 2 * wide <= count or wide < LEAST_PACKED or not 0 < trained < count:
        return ""
    return (
        f"{wide:,} frozen weights of blocks are float32, which takes twice the memory and time of "
        "bfloat16: load the model with dtype=torch.bfloat16, and leave out "
        "prepare_model_for_kbit_training, which casts them (wrap needs nothing of it)"
    )


def _refuse_sparse(model: nn.Module) -> None:
    for name, module in model.named_modules():
        sparse = isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse
        if sparse and module.weight.requires_grad:
            raise UnsupportedModel(
                f"{name} has sparse gradients (sparse=True), and gradients of wrapped weights are "
                "dense: make it with sparse=False (SparseAdam becomes AdamW), or freeze it"
            )
