"""The interface between the training loop and what is learned: batches, their loss, their metrics.

The loop, evaluation and calibration never look into a batch. They ask the objective.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor, nn

B = TypeVar("B")  # a micro-batch: what one forward and one backward pass take
B_co = TypeVar("B_co", covariant=True)


class Objective(Protocol[B]):
    """What a batch holds, what its loss is, and what an evaluation reports."""

    unit: str  # what a mean loss is a mean over, for messages: tokens, pairs, elements

    def count(self, batch: B) -> int:
        """Count the units of `batch`: its weight in the loss of a step and of an evaluation."""

    def rows(self, batch: B) -> int:
        """Count the rows of `batch`, which the engine may compute in chunks."""

    def tokens(self, batch: B) -> int:
        """Count the tokens that a pass over `batch` computes, for the throughput; 0 without any."""

    def loss(self, model: nn.Module, batch: B, step_count: int) -> Tensor:
        """Compute the sum of the losses of all units of `batch`, divided by `step_count`.

        `step_count` is the count of all batches of the optimizer step, so that their losses add up
        to the mean of the step, and their gradients to its gradient.

        `batch` is as the data made it, usually on the CPU: a wrapped model takes inputs from there,
        and its outputs are on its device. Random numbers come from torch's, numpy's or Python's
        global generators, whose states checkpoints keep.
        """

    def metrics(self, model: nn.Module, batch: B) -> Mapping[str, float]:
        """Compute the means over the units of `batch`: `loss`, and further ones by their names.

        Called without gradients, with the model in evaluation mode.
        """

    def to(self, batch: B, device: torch.device) -> B:
        """Copy the tensors of `batch` to `device`."""


class Cursor(Protocol):
    """The position in the training data, which a checkpoint keeps."""

    def state_dict(self) -> dict[str, Any]:
        """Return the position as plain JSON values."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a position; raises BadInput for a position in other data."""

    @property
    def served_steps(self) -> float | None:
        """Return of how many steps the rows were taken up to the position; None: unknown."""


class TrainingData(Cursor, Protocol[B_co]):
    """Endless batches, in an order that the cursor determines."""

    @property
    def epoch(self) -> float:
        """Return the epochs done, with the fraction of the current one."""

    def next_step(self) -> Sequence[B_co]:
        """Return all batches of the next optimizer step: several under gradient accumulation."""


@dataclass(frozen=True, kw_only=True)
class Task(Generic[B]):
    """What a run learns: an objective, with the batches it trains on and those held out."""

    objective: Objective[B]
    data: TrainingData[B]
    held_out: Callable[[], Iterable[B]]  # the batches of one evaluation; none: not evaluated


@dataclass(frozen=True)
class BoundBatch(Generic[B]):
    """A batch with its objective, which calibration times without looking into it."""

    objective: Objective[B]
    batch: B

    @property
    def rows(self) -> int:
        """Count the rows."""
        return self.objective.rows(self.batch)

    def loss(self, model: nn.Module) -> Tensor:
        """Compute the mean loss of the batch."""
        return self.objective.loss(model, self.batch, self.objective.count(self.batch))

    def to(self, device: torch.device) -> BoundBatch[B]:
        """Copy the batch to `device`."""
        return replace(self, batch=self.objective.to(self.batch, device))
