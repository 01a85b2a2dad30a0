"""`TrainingEngine`: what a trainer needs of the engine that holds a model.

`fluxtrain.wrap` makes the one there is (core/wrap/engine.py), which streams blocks. A model that is
sharded over several processes would be another.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

import torch
from torch import Tensor, nn

from fluxtrain.core.device.device import Device
from fluxtrain.core.device.spill import Spill
from fluxtrain.core.optimizer.state_shards import Held
from fluxtrain.core.ranks.exchange import Exchange
from fluxtrain.core.runtime.counters import Traffic
from fluxtrain.core.updates.loss_scale import LossScale
from fluxtrain.core.updates.norm import GradNorm
from fluxtrain.errors import MisusedModel
from fluxtrain.events.events import MemorySampled, Move, ResidencySampled
from fluxtrain.plan.placement import Placement

ENGINE = "_fluxtrain_engine"  # among the attributes of a model


class TrainingEngine(Protocol):
    """One model's memory, gradients and updates; the model itself computes."""

    chunk_rows: int  # of a batch at once; 0: chosen at the first forward
    retries_blocks: bool  # that run out of device memory, with fewer rows at once
    loss_scale: LossScale | None  # of fp16
    plan: Placement  # where everything is, and why
    exchange: Exchange  # with the other processes of the run

    @property
    def compression(self) -> str:
        """Tell how gradients are compressed, and between which ranks; "": not at all."""

    @property
    def in_lockstep(self) -> bool:
        """Return whether every rank must compute as often as the others."""

    @property
    def takes_less(self) -> tuple[str, ...]:
        """Name settings with which the device holds less."""

    @property
    def device(self) -> Device:
        """Return the device of inputs and loss."""

    @property
    def spill(self) -> Spill:
        """Return the scratch file of optimizer states on disk."""

    @property
    def card_count(self) -> int:
        """Return how many GPUs compute, or 1 for the processor."""

    @property
    def unit_names(self) -> list[str]:
        """Return the modules that are streamed one by one, by their names in the model."""

    # -- a step ------------------------------------------------------------------------------------

    def clip_grad_norm(self, max_norm: float | None, losses: Sequence[Tensor] = ()) -> GradNorm:
        """Measure the global norm; the next optimizer step scales by it. None only measures."""

    def begin_step_in_backward(
        self, optimizer: torch.optim.Optimizer, loss: Tensor | None = None
    ) -> None:
        """Update each group as soon as its gradients are complete, in the next backward pass."""

    @property
    def partly_updated(self) -> bool:
        """Return whether a step in backward has updated some groups and not all."""

    def forget_gradients(self) -> None:
        """Drop all gradients, without reading them."""

    def begin_step_again(self) -> None:
        """Drop what a step that broke off has left."""

    def free_gradients(self) -> None:
        """Drop all gradients and their memory."""

    def flush(self) -> None:
        """Wait for all updates under way; raise what made one fail."""

    def forget_refused(self) -> None:
        """Wait for all updates under way without raising that one was refused."""

    def evaluating(self) -> AbstractContextManager[None]:
        """Wait for updates; inside, losses without gradients are computed as in training."""

    def close(self) -> None:
        """Stop the threads; the model must not be used afterwards."""

    # -- what it holds and has done ----------------------------------------------------------------

    @property
    def parameter_counts(self) -> tuple[int, int]:
        """Return how many parameters there are, and how many of them are trained."""

    def residency(self) -> ResidencySampled:
        """Return where the weights, gradients and states of each block are."""

    def memory(self) -> MemorySampled:
        """Add up the bytes held now."""

    def lacks_bytes(self) -> tuple[int, ...]:
        """Return the bytes of each card that the next step is expected to lack; 0 where block
        inputs can leave for it, below 0: what is left."""

    def traffic(self) -> Traffic:
        """Count the bytes moved since the start."""

    def take_moves(self, limit: int) -> tuple[list[Move], int]:
        """Return the latest moves that have ended, and the count of all that were started."""

    def take_stalls(self) -> dict[str, float]:
        """Return the seconds that the computation waited since the last call, by cause."""

    @property
    def held_s(self) -> float:
        """Return the seconds that updates have waited for the copies of checkpoints."""

    # -- its training state ------------------------------------------------------------------------

    def state_shards(self) -> Iterator[tuple[str, dict[str, Tensor]]]:
        """Yield the whole training state, a shard for each group."""

    def shard_bytes(self) -> int:
        """Return the most bytes that all shards take now."""

    def hold_for_saving(self, name: str) -> Held | None:
        """Let the next update of a group wait until it is copied; None for a shard that must be
        copied before it."""

    def load_state_shard(self, name: str, tensors: dict[str, Tensor]) -> None:
        """Restore one shard exactly. Raises BadInput when it belongs to another model."""


def training_engine_of(model: nn.Module) -> TrainingEngine:
    """Return the engine that holds a model. Raises MisusedModel where none does."""
    engine: TrainingEngine | None = model.__dict__.get(ENGINE)
    if engine is None:
        raise MisusedModel(
            f"{type(model).__name__} is not wrapped: call fluxtrain.wrap(model) first"
        )
    return engine
