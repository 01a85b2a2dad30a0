"""Evaluate an objective on held-out batches, and end training where that no longer improves."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import nn

from fluxtrain.config.schema import TrainSettings
from fluxtrain.core.ranks.join import ALONE, Ranks
from fluxtrain.events.events import EvaluationFinished, StoppedEarly
from fluxtrain.methods.objective import B, Objective
from fluxtrain.train.checkpoint.randomness import randomness_of
from fluxtrain.train.checkpoint.run_state import RunState

SEED = 0  # for what an evaluation draws (noise, timesteps), so that all draw the same


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """The mean of every metric over `count` units of the objective."""

    metrics: Mapping[str, float]  # `loss`, and what else the objective reports
    count: int
    seconds: float

    @property
    def loss(self) -> float:
        """Return the mean loss."""
        return self.metrics["loss"]


def evaluation_event(
    result: Evaluation, state: RunState, unit: str, patience: int | None
) -> EvaluationFinished:
    """Make the event of an evaluation that `state` has counted."""
    return EvaluationFinished(
        step=state.step,
        loss=result.loss,
        metrics=dict(result.metrics),
        count=result.count,
        unit=unit,
        seconds=result.seconds,
        best_step=state.best_step,
        best_loss=state.best_loss,
        stale=state.stale_evaluations,
        patience=patience,
    )


def evaluate(
    objective: Objective[B],
    model: nn.Module,
    batches: Iterable[B],
    stop: Callable[[], bool] = lambda: False,
    ranks: Ranks = ALONE,
    *,
    in_lockstep: bool = False,
    meet: Callable[[], None] = lambda: None,
) -> Evaluation | None:
    """Evaluate `model` as it is now; pending updates must be flushed before. Each of several
    `ranks` takes every so many-th batch, and all `meet` before they add up; `in_lockstep` all
    compute equally often.

    Restores the model's training mode and the random state. Returns None when there is nothing to
    evaluate, or when `stop` returned True between two batches.
    """
    started_s = time.perf_counter()
    was_training = model.training
    totals: dict[str, float] = {}
    count = 0
    model.eval()
    try:
        with torch.no_grad(), randomness_of(SEED):
            number, batch = -1, None
            for number, batch in enumerate(batches):
                if stop():
                    return None
                if number % ranks.world != ranks.rank:
                    continue
                units = objective.count(batch)
                for name, mean in objective.metrics(model, batch).items():
                    totals[name] = totals.get(name, 0.0) + mean * units
                count += units
            if in_lockstep and batch is not None and ranks.rank > number % ranks.world:
                objective.metrics(model, batch)  # beside the ranks that had one more
    finally:
        model.train(was_training)
    if ranks.world > 1:
        meet()
        names = sorted(set().union(*ranks.gather(set(totals))))
        every, *sums = ranks.total([count, *(totals.get(name, 0.0) for name in names)])
        totals, count = dict(zip(names, sums, strict=True)), int(every)
    if not count:
        return None
    return Evaluation(
        metrics={name: total / count for name, total in totals.items()},
        count=count,
        seconds=time.perf_counter() - started_s,
    )


@dataclass(frozen=True, kw_only=True)
class EarlyStopping:
    """How long training waits for a better evaluation; without patience it never ends early."""

    patience: int | None = None  # evaluations in a row without an improvement
    threshold: float = 0.0  # the smallest improvement that counts, in the unit of the loss

    @classmethod
    def of(cls, settings: TrainSettings) -> EarlyStopping:
        """Read it from the settings of a run."""
        return cls(
            patience=settings.early_stopping_patience,
            threshold=settings.early_stopping_threshold,
        )

    def is_reached(self, state: RunState) -> bool:
        """Return whether training ends now. A resumed run asks this before its first step."""
        return self.patience is not None and state.stale_evaluations >= self.patience

    def event(self, state: RunState, total_steps: int) -> StoppedEarly:
        """Report that training ended, and its best step."""
        return StoppedEarly(
            step=state.step,
            total_steps=total_steps,
            stale=state.stale_evaluations,
            threshold=self.threshold,
            best_step=state.best_step,
            best_loss=state.best_loss,
        )
