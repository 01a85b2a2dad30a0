"""What `wrap` refuses before it touches a model, each with the cure, and what it advises.

FluxTrain's own commands wrap without advice: they tell their user in words of the command line.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import nn

from fluxtrain.core.memory.group import Group
from fluxtrain.core.ranks.exchange import NOT_EXCHANGED, Exchange
from fluxtrain.core.ranks.join import launched_world, world_size
from fluxtrain.errors import BadInput, MisusedModel, UnsupportedModel
from fluxtrain.plan.states import LEAST_PACKED

_of_a_command = ContextVar("of_a_command", default=False)


def refuse_other_objects(model: object) -> None:
    """Raise BadInput for an object that is no model."""
    if not isinstance(model, nn.Module):
        raise BadInput(f"wrap takes a torch.nn.Module, not {type(model).__name__}")


def refuse_several_processes() -> None:
    """Raise MisusedModel in one of several processes that a launcher has started."""
    count = max(world_size(), launched_world())
    if count > 1:
        raise MisusedModel(
            f"this is one of {count} processes (WORLD_SIZE, or a torch.distributed group): start "
            "this command as one process, without torchrun"
        )


def refuse_other_group(exchange: Exchange) -> None:
    """Raise MisusedModel where processes were joined, or left, since a model was wrapped."""
    mine, now = exchange.ranks.world, world_size()
    if exchange is not NOT_EXCHANGED and mine != now:
        raise MisusedModel(
            f"this is one of {now} processes, and the model was wrapped as that of {mine}: nothing "
            "would add up their gradients. Call torch.distributed.init_process_group() before "
            "fluxtrain.wrap, and destroy_process_group() after the last step"
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


@contextmanager
def without_advice() -> Iterator[None]:
    """Wrap for a command, whose user cannot call a library differently, and for its process alone:
    what it measures is no part of a training by several."""
    before = _of_a_command.set(True)
    try:
        yield
    finally:
        _of_a_command.reset(before)


def is_of_a_command() -> bool:
    """Return whether a command wraps, inside of `without_advice`."""
    return _of_a_command.get()


def advice(groups: Iterable[Group]) -> str:
    """Name what a program could do better before it calls `wrap`; empty if nothing.

    peft's `prepare_model_for_kbit_training` casts every weight that is not packed to fp32.
    """
    wide = 0 if _of_a_command.get() else wide_frozen_weights(groups)
    if not wide:
        return ""
    return (
        f"{wide:,} frozen weights of blocks are float32, which takes twice the memory and time of "
        "bfloat16: load the model with dtype=torch.bfloat16, and leave out "
        "prepare_model_for_kbit_training, which casts them and which wrap does not need"
    )


def wide_frozen_weights(groups: Iterable[Group]) -> int:
    """Count the blocks' frozen fp32 weights under adapters; 0 unless they are most of them."""
    blocks = [group for group in groups if group.kind == "block"]
    frozen = [m for group in blocks for m in group.members if not m.trained]
    wide = sum(m.count for m in frozen if m.segment.dtype == torch.float32)
    count = sum(m.count for m in frozen)
    trained = sum(group.trained_count for group in blocks)
    few = 2 * wide <= count or wide < LEAST_PACKED
    return wide if not few and 0 < trained < count else 0
