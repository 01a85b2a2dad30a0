"""`Engine`: the engine of one wrapped model, with the methods that a trainer calls.

Its state is in `Context`. One engine belongs to one model and is used by the thread that runs it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.autograd.grad_mode import set_multithreading_enabled

from fluxtrain.core.optimizer.hook import begin_step_in_backward
from fluxtrain.core.optimizer.state_shards import (
    Held,
    hold_for_saving,
    load_state_shard,
    shard_bytes,
    state_shards,
)
from fluxtrain.core.runtime.context import Context
from fluxtrain.core.runtime.counters import Traffic
from fluxtrain.core.runtime.stats import (
    memory_use,
    residency,
)
from fluxtrain.core.runtime.user_gradients import named_norm_parts, on_one_device
from fluxtrain.core.updates.norm import GradNorm
from fluxtrain.errors import MisusedModel
from fluxtrain.events.events import MemorySampled, Move, ResidencySampled


class Engine(Context):
    """Streams one model's blocks; see `fluxtrain.wrap`."""

    adapters: tuple[str, ...] = ()  # names of peft's in the model that was wrapped
    again: Callable[[nn.Module], None]  # wraps the model once more, with what was put into it
    compression = ""
    one_thread: set_multithreading_enabled | None = None  # computes backward on all cards

    @property
    def in_lockstep(self) -> bool:
        """Return whether each rank must compute as often as the others, which send it weights."""
        return self.exchange.shares is not None and self.exchange.shares.memory is None

    @property
    def takes_less(self) -> tuple[str, ...]:
        """Name settings with which the device holds less."""
        chunks = ("set a smaller placement.chunk_rows",) if self.chunk_rows > 1 else ()
        return (*chunks, *("set placement.offload=max",) * (self.plan.offload != "max"))

    # -- a step ------------------------------------------------------------------------------------

    def forget_gradients(self) -> None:
        """Drop all gradients, without reading them."""
        for group in self.groups:
            if group.has_gradient:
                self.gradients_of(group).host.forget(group)

    def begin_step_again(self) -> None:
        """Drop what a step that broke off has left, so that every process begins it alike."""
        self.abandon_backward()
        self.forget_gradients()
        for group in self.groups:
            if group.is_gathered:  # slots have other blocks than in other processes
                group.weights_changed(frozen=True)

    def free_gradients(self) -> None:
        """Drop all gradients and free their memory; a later backward pass allocates it again."""
        self.flush()
        self.forget_gradients()
        for card in self.cards:
            card.gradients.host.give_ring_back(self.groups)
            card.gradients.free_memory()
        addresses = {at for group in self.groups for at in group.memory.give_up_gradients()}
        for group in self.groups:
            group.memory.drop_gradient_arenas(addresses)

    def clip_grad_norm(self, max_norm: float | None, losses: Sequence[Tensor] = ()) -> GradNorm:
        """Measure the global norm; the next optimizer step scales by it. None only measures.

        `losses` are read with it; the step is skipped where the norm or a loss is not finite.
        """
        named = named_norm_parts(self)
        parts = on_one_device([part for _, part in named], self.device.torch_device)
        scale = self.loss_scale.value if self.loss_scale is not None else None
        names = [name for name, _ in named]
        self.norm = GradNorm(self.device, parts, max_norm, losses, scale, names, self.exchange)
        return self.norm

    def begin_step_in_backward(
        self, optimizer: torch.optim.Optimizer, loss: Tensor | None = None
    ) -> None:
        """Update each group as soon as its gradients are complete, in the one backward pass of a
        step without clipping. Call this before that pass; it reads the hyperparameters.
        `optimizer.step()` ends the step.

        Groups that the graph still needs (a block called twice, a weight used outside of its block)
        are updated later, by `optimizer.step()` at the latest. There is no norm to clip by. An
        alias of an alias of a weight (`w.detach().detach()`) that the graph needs is not noticed.
        """
        if self.loss_scale is not None:
            raise MisusedModel("with a loss scale no group is updated before the norm is known")
        self.forget_orphaned_step()
        if self.partly_updated:
            raise MisusedModel("a step in backward is under way: optimizer.step() ends it")
        self.norm = None
        self.step_in_backward = begin_step_in_backward(self, optimizer, loss)

    def forget_refused(self) -> None:
        """Wait for all updates under way without raising for a refused one, which is known."""
        self.updates.forget_refused()

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Wait for updates; inside the context, a loss without gradients is fused with the head
        too."""
        self.flush()
        self.lazy_without_gradients = True
        try:
            yield
        finally:
            self.lazy_without_gradients = False

    def close(self) -> None:
        """Stop the threads; the model must not be used afterwards (`unwrap` calls this)."""
        self.use.ended = True
        if self.one_thread is not None:
            set_multithreading_enabled(self.one_thread.prev)
        try:
            self.updates.wait()
        finally:  # also after a failed update
            self.updates.close()
            self.exchange.close()
            self.spill.close()
            for card in self.cards:
                card.window.drain()
                if card.gradients.sums is not None:
                    card.gradients.sums.close()
                card.device.close()

    # -- what it holds and has done ----------------------------------------------------------------

    @property
    def card_count(self) -> int:
        """Return how many GPUs compute, or 1 for the processor."""
        return len(self.cards)

    @property
    def unit_names(self) -> list[str]:
        """Return the modules that are streamed one by one, by their names in the model."""
        return [unit.name for unit in self.units]

    @property
    def held_s(self) -> float:
        """Return the seconds that updates have waited for the copies of checkpoints."""
        return self.updates.held_s

    @property
    def parameter_counts(self) -> tuple[int, int]:
        """Return how many parameters there are, and how many of them are trained."""
        counts = [(group.count, group.trained_count) for group in self.groups]
        return sum(every for every, _ in counts), sum(trained for _, trained in counts)

    def residency(self) -> ResidencySampled:
        """Return where the weights, gradients and states of each block are."""
        return residency(self)

    def memory(self) -> MemorySampled:
        """Add up the bytes held now."""
        return memory_use(self)

    def lacks_bytes(self) -> tuple[int, ...]:
        """Return the bytes of each card that the next step is expected to lack; 0 where block
        inputs can leave for it, below 0: what is left."""
        return tuple(card.watch.settings_must_free_bytes for card in self.cards)

    def traffic(self) -> Traffic:
        """Count the bytes moved since the start."""
        found, spill = self.counters.traffic(), self.spill
        read_bytes = found.disk_read_bytes + spill.read_bytes
        return replace(found, disk_read_bytes=read_bytes, disk_written_bytes=spill.written_bytes)

    def take_moves(self, limit: int) -> tuple[list[Move], int]:
        """Return the latest moves that have ended, and the count of all that were started."""
        return self.counters.take_moves(limit)

    def take_stalls(self) -> dict[str, float]:
        """Return the seconds that the computation waited since the last call, by cause; of several
        cards those of the one that waited longest."""
        found: dict[str, float] = {}
        for card in self.cards:
            for cause, seconds in card.device.stalls.take().items():
                found[cause] = max(found.get(cause, 0.0), seconds)
        return found

    # -- its training state ------------------------------------------------------------------------

    def state_shards(self) -> Iterator[tuple[str, dict[str, Tensor]]]:
        """Yield the whole training state, a shard for each group."""
        return state_shards(self)

    def shard_bytes(self) -> int:
        """Return the most bytes that all shards take now."""
        return shard_bytes(self)

    def hold_for_saving(self, name: str) -> Held | None:
        """Let the next update of a group wait until it is copied; None for a shard that must be
        copied before it."""
        return hold_for_saving(self, name)

    def load_state_shard(self, name: str, tensors: dict[str, Tensor]) -> None:
        """Restore one shard exactly. Raises BadInput when it belongs to another model."""
        load_state_shard(self, name, tensors)


def engine_of(model: nn.Module) -> Engine:
    """Return the engine of a wrapped model. Raises MisusedModel for any other."""
    engine = model.__dict__.get("_fluxtrain_engine")
    if not isinstance(engine, Engine):
        raise MisusedModel(
            f"{type(model).__name__} is not wrapped: call fluxtrain.wrap(model) first"
        )
    return engine
