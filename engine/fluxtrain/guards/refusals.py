"""Refuse models that `wrap` cannot take before it touches them, each with the cure."""

from __future__ import annotations

from torch import nn

from fluxtrain.errors import BadInput, UnsupportedModel


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


def _refuse_sparse(model: nn.Module) -> None:
    for name, module in model.named_modules():
        sparse = isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse
        if sparse and module.weight.requires_grad:
            raise UnsupportedModel(
                f"{name} has sparse gradients (sparse=True), and gradients of wrapped weights are "
                "dense: make it with sparse=False (SparseAdam becomes AdamW), or freeze it"
            )
