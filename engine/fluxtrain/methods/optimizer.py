"""The optimizer of a run: FluxTrain's AdamW, or one of another package, behind one protocol."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn

from fluxtrain.config.schema import TrainSettings
from fluxtrain.core.optimizer.third_party import ThirdPartyOptimizer, third_party_optimizer
from fluxtrain.core.wrap.engine import engine_of

if TYPE_CHECKING:
    from fluxtrain.methods.engine import TrainingEngine
from collections.abc import Collection


def parameter_groups(
    model: nn.Module, *, learning_rate: float, weight_decay: float, no_decay: Collection[str]
) -> list[dict[str, Any]]:
    """Return AdamW's groups of the trained parameters: the decayed ones, then the others.

    `no_decay` names kinds: norms, biases, embeddings. A tied output layer is an embedding. Empty
    groups are left out; each parameter is in exactly one.
    """
    exempt = _exempt(model, no_decay)
    trained = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trained if id(p) not in exempt], "weight_decay": weight_decay},
        {"params": [p for p in trained if id(p) in exempt], "weight_decay": 0.0},
    ]
    return [{**group, "lr": learning_rate} for group in groups if group["params"]]


def _exempt(model: nn.Module, no_decay: Collection[str]) -> set[int]:
    found: set[int] = set()
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if _kind(module, name) in no_decay:
                found.add(id(parameter))
    return found


def _kind(module: nn.Module, name: str) -> str:
    kind = type(module).__name__.lower()
    if isinstance(module, nn.Embedding) or "embedding" in kind:
        return "embeddings"
    if "norm" in kind:
        return "norms"
    return "biases" if name.endswith("bias") else "weights"


class Optimizer(Protocol):
    """The training loop's and the checkpoints' interface to an optimizer."""

    updates_in_backward: bool  # whether `begin_in_backward` may be called

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Return the parameter groups with their hyperparameters, which `step` reads."""

    def begin_in_backward(self, loss: Tensor) -> None:
        """Update each block in the coming backward pass of `loss`; `step` ends it."""

    def step(self) -> None:
        """Update all weights that were not updated in the backward pass."""

    def zero_grad(self) -> None:
        """Forget all gradients."""

    def state_shards(self) -> Iterator[tuple[str, dict[str, Tensor]]]:
        """Yield the state that the engine does not keep, by name, for a checkpoint."""

    def load_state_shard(self, name: str, tensors: dict[str, Tensor]) -> bool:
        """Load one of `state_shards`; False where `name` is the engine's."""


class EngineAdamW:
    """`torch.optim.AdamW` over a wrapped model, which the engine steps block by block. The engine
    keeps masters and moments, so this object has no state."""

    updates_in_backward = True

    def __init__(self, engine: TrainingEngine, parameters: Iterable[Any], **options: Any) -> None:
        self._engine = engine
        self._adamw = torch.optim.AdamW(parameters, **options)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Return AdamW's groups."""
        return self._adamw.param_groups

    def begin_in_backward(self, loss: Tensor) -> None:
        """Update each block as soon as its gradients are complete."""
        self._engine.begin_step_in_backward(self._adamw, loss)

    def step(self) -> None:
        """Queue the updates; the next forward pass waits for them block by block."""
        self._adamw.step()

    def zero_grad(self) -> None:
        """Forget the gradients of parameters outside all groups, and of the groups."""
        self._adamw.zero_grad()

    def state_shards(self) -> Iterator[tuple[str, dict[str, Tensor]]]:
        """Yield nothing: the engine holds all state."""
        return iter(())

    def load_state_shard(self, name: str, tensors: dict[str, Tensor]) -> bool:
        """Leave every shard to the engine."""
        return False


def set_learning_rate(optimizer: Optimizer, rate: float) -> None:
    """Set the rate of the next step for all parameters."""
    for group in optimizer.param_groups:
        if isinstance(group["lr"], torch.Tensor):
            group["lr"].fill_(rate)  # compiled steps read this tensor
        else:
            group["lr"] = rate


def make_optimizer(settings: TrainSettings, model: nn.Module, learning_rate: float) -> Optimizer:
    """Make the optimizer that `settings` name, over the trained parameters of a wrapped model.

    Raises BadInput when its package cannot be used.
    """
    groups = parameter_groups(
        model,
        learning_rate=learning_rate,
        weight_decay=settings.weight_decay,
        no_decay=settings.no_decay,
    )
    options: Any = {"lr": learning_rate, "betas": settings.betas, "eps": settings.eps}
    engine = engine_of(model)
    if settings.optimizer == "adamw":
        return EngineAdamW(engine, groups, **options)
    make = partial(third_party_optimizer, settings.optimizer, **options)
    return ThirdPartyOptimizer(engine, groups, make)
