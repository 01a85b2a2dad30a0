"""Hold a queued step until its numbers are read; count and skip steps that are not finite."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Generic

import torch
from torch import Tensor, nn

from fluxtrain.core.updates.loss_scale import LEAST
from fluxtrain.core.updates.norm import GradNorm
from fluxtrain.errors import Diverged
from fluxtrain.events.emitter import Announcer
from fluxtrain.methods.engine import TrainingEngine, training_engine_of
from fluxtrain.methods.objective import B, Objective
from fluxtrain.train.checkpoint.randomness import random_state, restore_random_state
from fluxtrain.train.checkpoint.run_state import RunState
from fluxtrain.train.observe.step_clock import StepClock

MOST_IN_A_ROW = 5  # after so many the weights are at fault, not a row of the data
_TOLD_ONE_BY_ONE = 10


@dataclass(frozen=True, kw_only=True)
class Computed:
    """The numbers of a step: its mean loss, and its gradient norm before clipping."""

    loss: float
    norm: float
    loss_scale: float | None = None  # of fp16
    overflowed: bool = False  # the gradients, at this scale

    @property
    def is_finite(self) -> bool:
        """Return whether loss and norm are finite; if not, the weights must not be updated."""
        return math.isfinite(self.loss) and math.isfinite(self.norm)

    @property
    def left_out(self) -> bool:
        """Return whether the step failed for its loss scale alone; the next one, at half the scale,
        may succeed."""
        return self.overflowed and self.loss_scale is not None and self.loss_scale > LEAST


@dataclass(frozen=True, kw_only=True)
class QueuedStep:
    """A step whose forward, backward and update are queued; `read` waits for its numbers."""

    number: int  # of the step, from 1
    tokens: int
    epoch: float
    learning_rate: float
    in_backward: bool  # updated in the backward pass
    norm: GradNorm  # read together with the losses
    clock: StepClock
    batches: Sequence[Any] = ()  # to look into a step that is not finite

    def read(self) -> Computed:
        """Wait for the backward pass; the batches' losses add up to the mean loss of the step."""
        return Computed(
            loss=math.fsum(self.norm.losses()),
            norm=self.norm.value(),
            loss_scale=self.norm.loss_scale(),
            overflowed=self.norm.overflowed(),
        )


class Refusals(Generic[B]):
    """Decides about steps that changed no weight because they were not finite.

    The first of a row of them is looked into: the block whose gradient, or whose output, was the
    first that is not finite is named when the run ends for it.
    """

    def __init__(
        self,
        model: nn.Module,
        objective: Objective[B],
        announcer: Announcer,
        state: RunState,
        last_checkpoint: Callable[[], str],
        total_steps: int,
    ) -> None:
        self._model, self._objective = model, objective
        self._engine: TrainingEngine = training_engine_of(model)
        self._announcer, self._state = announcer, state
        self._last_checkpoint = last_checkpoint
        self._most = min(MOST_IN_A_ROW, total_steps)  # a run of skipped steps alone has no end

    @property
    def under_way(self) -> bool:
        """Return whether the last step was skipped, so that a checkpoint may hold weights that
        lead nowhere."""
        return self._state.skipped_in_a_row > 0

    def leaves_out(self, queued: QueuedStep, computed: Computed) -> bool:
        """Return whether a step changed no weight; count it where it is not finite.

        Raises:
            Diverged: it was applied in part, or is one too many in a row.
        """
        state = self._state
        if computed.is_finite or computed.left_out:
            state.skipped_in_a_row = 0
            return computed.left_out
        if not self.under_way:
            state.skipped_from = self._began_in(queued, computed)
        if queued.in_backward:
            raise Diverged(self._text(queued, computed))
        state.skipped += 1
        state.skipped_in_a_row += 1
        if state.skipped_in_a_row >= self._most:
            raise Diverged(self._text(queued, computed))
        if state.skipped <= _TOLD_ONE_BY_ONE or state.skipped % 100 == 0:
            self._announcer.warn(
                f"step {queued.number} was skipped: {_seen(computed)}, first in "
                f"{state.skipped_from}; no weight was changed ({state.skipped} skipped in all, "
                f"{self._most} in a row end the run)"
            )
        return True

    def divergence(self, seen: str, applied: str) -> str:
        """Return the message of a run that ends, with the cure."""
        return (
            f"{seen}: this update {applied}; {self._last_checkpoint()}; lower "
            "train.learning_rate, lengthen train.warmup_steps, or look for broken rows in the data"
        )

    def _text(self, queued: QueuedStep, computed: Computed) -> str:
        seen = (
            f"{_seen(computed)} at step {queued.number} (learning rate {queued.learning_rate:.3g})"
        )
        row = self._state.skipped_in_a_row
        if row:
            seen += (
                f", the last of {row} steps in a row; it began in {self._state.skipped_from} at "
                f"step {queued.number - row + 1}"
            )
        else:
            seen += f", first in {self._state.skipped_from}"
        in_part = queued.in_backward and math.isfinite(computed.loss)
        text = self.divergence(seen, "was applied in part" if in_part else "was not applied")
        scaled = computed.loss_scale is not None
        return text + (", or use model.dtype=float32: fp16 ends at 65504" if scaled else "")

    def _began_in(self, queued: QueuedStep, computed: Computed) -> str:
        """Name the block whose gradient was the first in the backward pass that is not finite; for
        a loss that is not, the block whose output was."""
        if math.isfinite(computed.loss):
            return f"the gradient of {queued.norm.began_in() or 'the model'}"
        return self.broken_output(queued.batches)

    def broken_output(self, batches: Sequence[Any]) -> str:
        """Name the first block whose output is not finite in a step whose loss was not."""
        self._engine.forget_refused()
        with _random_state_kept():
            name = self._first_output(batches)
        return f"the output of {name}" if name else "the loss itself"

    def _first_output(self, batches: Sequence[Any]) -> str | None:
        """Compute the step's losses again, with the weights that it did not change."""
        found: list[str] = []

        def look(name: str) -> Callable[..., None]:
            def looked(_module: nn.Module, _inputs: object, output: object) -> None:
                if not found and not _is_finite(output):
                    found.append(name)

            return looked

        handles = [
            self._model.get_submodule(name).register_forward_hook(look(name))
            for name in self._engine.unit_names
        ]
        try:
            out_of_memory = suppress(torch.OutOfMemoryError)  # what was seen until then counts
            with out_of_memory, self._engine.evaluating(), torch.no_grad():
                for batch in batches:
                    self._objective.loss(self._model, batch, self._objective.count(batch))
        finally:
            for handle in handles:
                handle.remove()
        return found[0] if found else None


def _seen(computed: Computed) -> str:
    return f"the loss is {computed.loss:g} and the gradient norm {computed.norm:g}"


def _is_finite(output: object) -> bool:
    """Return whether all numbers of a block's output are finite; what it cannot look into is."""
    if isinstance(output, Tensor) and type(output) is Tensor:
        return not output.is_floating_point() or bool(torch.isfinite(output).all())
    if isinstance(output, tuple | list):
        return all(map(_is_finite, output))
    return True


@contextmanager
def _random_state_kept() -> Iterator[None]:
    before = random_state()
    try:
        yield
    finally:
        restore_random_state(before)
