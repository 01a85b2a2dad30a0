"""End training where evaluations no longer improve."""

from __future__ import annotations

from dataclasses import dataclass

from fluxtrain.config.schema import TrainSettings
from fluxtrain.events.events import StoppedEarly
from fluxtrain.train.checkpoint.run_state import RunState


@dataclass(frozen=True, kw_only=True)
class EarlyStopping:
    """How long training waits for a better evaluation; a run with no patience set never ends."""

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
        """Say that training ended, and where it was best."""
        return StoppedEarly(
            step=state.step,
            total_steps=total_steps,
            stale=state.stale_evaluations,
            threshold=self.threshold,
            best_step=state.best_step,
            best_loss=state.best_loss,
        )
