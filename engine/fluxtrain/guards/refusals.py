"""Refuse models that `wrap` cannot take before it touches them, each with the cure."""

from __future__ import annotations

import os

from torch import distributed, nn

from fluxtrain.errors import BadInput, MisusedModel, UnsupportedModel


def refuse_other_objects(model: object) -> None:
    """Raise BadInput for what is no model."""
    if not isinstance(model, nn.Module):
        raise BadInput(f"wrap takes a torch.nn.Module, not {type(model).__name__}")


def refuse_several_processes() -> None:
    """Raise MisusedModel in one of several processes: nothing adds their gradients up."""
    launched = os.environ.get("WORLD_SIZE", "")
    count = int(launched) if launched.isdecimal() else 1
    if distributed.is_available() and distributed.is_initialized():
        count = max(count, distributed.get_world_size())
    if count > 1:
        raise MisusedModel(
            f"this is one of {count} processes (WORLD_SIZE, or a torch.distributed group), and "
            "nothing adds up the gradients of several: each would train a model of its own. Start "
            "one process, without torchrun, accelerate launch and DistributedDataParallel: it uses "
            "all cards"
        )


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


def _refuse_sparse(model: nn.Module) -> None:
    for name, module in model.named_modules():
        sparse = isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse
        if sparse and module.weight.requires_grad:
            raise UnsupportedModel(
                f"{name} has sparse gradients (sparse=True), and gradients of wrapped weights are "
                "dense: make it with sparse=False (SparseAdam becomes AdamW), or freeze it"
            )
