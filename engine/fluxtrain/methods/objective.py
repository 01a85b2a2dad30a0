"""The interface between a run and what is learned: batches, their loss, their metrics.

A method makes a `Task` from the configuration and the loaded model. The run, its loop, evaluation
and calibration never look into a batch: they ask the task for batches and its objective for losses.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Generic, Literal, Protocol, TypeVar

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from pathlib import Path

    from fluxtrain.events.emitter import Announcer
    from fluxtrain.events.events import ChoiceMade, SampleFit

Part = Literal["trained", "held_out"]
B = TypeVar("B")  # a micro-batch: what one forward and one backward pass take
B_co = TypeVar("B_co", covariant=True)


_CUDNN_TILE = 128  # tokens


def choose_attention(tokens: int | None) -> None:
    """Let attention use cuDNN's kernels only where they are right. tokens: of a row of text; None:
    of pictures, whose tokens see later ones.

    At some lengths that are no multiple of its tile gradients are wrong or not finite
    (https://github.com/pytorch/pytorch/issues/196678); of pictures, 8,704 tokens gave losses that
    are not finite, and accesses outside of memory. Seen with torch 2.11 on an H200.
    """
    torch.backends.cuda.enable_cudnn_sdp(tokens is not None and tokens % _CUDNN_TILE == 0)


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


class TrainingData(Cursor, Protocol[B_co]):
    """Endless batches, in an order that the cursor determines."""

    @property
    def epoch(self) -> float:
        """Return the epochs done, with the fraction of the current one."""

    @property
    def steps_per_epoch(self) -> int:
        """Return the steps until each row was seen once, the last step whole."""

    def next_step(self) -> Sequence[B_co]:
        """Return all batches of the next optimizer step: several under gradient accumulation."""


@dataclass(frozen=True, kw_only=True)
class BoundTask(Generic[B]):
    """A task whose batches have their size, as the loop runs it."""

    objective: Objective[B]
    data: TrainingData[B]
    held_out: Callable[[], Iterable[B]]  # the batches of one evaluation; none: not evaluated


@dataclass(frozen=True, kw_only=True)
class SamplePrompt:
    """Text that a model continues."""

    text: str
    talks: bool  # the data are conversations, and `text` is a user's words


class Sampler(Protocol):
    """Shows what the model makes of fixed inputs, between two steps."""

    def is_due(self, step: int, total_steps: int, *, evaluated: bool) -> bool:
        """Return whether samples are made after `step`."""

    def write(self, step: int, stopped: Callable[[], bool]) -> None:
        """Make all samples with the weights after `step`, and report them; what goes wrong is a
        warning."""


@dataclass(frozen=True, kw_only=True)
class Task(ABC, Generic[B]):
    """The whole training task: the objective, and every batch."""

    objective: Objective[B]
    source: str  # the name of the data, for messages
    choices: Sequence[ChoiceMade]  # what was chosen for the data, such as its format
    uneven: bool  # some rows may take more memory than typical ones: `fullest` returns them
    ends: Sequence[int]  # tokens at which answers and generation end; none without text
    prompt: SamplePrompt | None  # that the trained model continues at the end
    # made of the wrapped model, its device, and the run's announcer and folder; None: answers to
    # samples.prompts
    sampler: Callable[[nn.Module, torch.device, Announcer, Path], Sampler] | None = None

    @abstractmethod
    def notes(self, part: Part) -> Sequence[str]:
        """Return notes on the data for a person, a sentence each, before a part is used."""

    @abstractmethod
    def rows(self, part: Part) -> int:
        """Count the rows of a part of the data."""

    @abstractmethod
    def fingerprint(self, part: Part) -> str | None:
        """Return a value that changes whenever these rows do; None where the part has no rows."""

    @abstractmethod
    def sample_fit(self) -> SampleFit:
        """Count the samples to train on that do not fit into a row."""

    @abstractmethod
    def bound(self, batch_rows: int) -> BoundTask[B]:
        """Return endless training data in batches of `batch_rows` rows, and the held-out batches.

        Raises BadInput where a step takes more rows than there are.
        """

    @abstractmethod
    def in_order(self, part: Part, batch_rows: int) -> Iterable[B]:
        """Yield every row of a part once, in a fixed order; the last batch may be smaller."""

    @abstractmethod
    def typical(self, rows: int) -> B:
        """Return a batch of `rows` rows that costs what most batches cost, for measurements."""

    @abstractmethod
    def fullest(self, rows: int) -> B | None:
        """Return a batch that takes the most memory; None where that is a typical one."""


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
