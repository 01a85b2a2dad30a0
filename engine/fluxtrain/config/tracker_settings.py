"""The settings of trackers: where else a run is reported."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from fluxtrain.config.section import Section, Several

TrackerName = Literal["tensorboard", "wandb", "mlflow", "trackio"]
Words = Annotated[str, Field(min_length=1, max_length=200)]


def _none_of_them(value: Any) -> Any:
    """Read `none`, as other programs write it, and an empty entry as no tracker."""
    return [] if value in (None, "none", ["none"]) else value


class TrackerSettings(Section):
    """Where else a run is reported, through the trackers' own libraries; nowhere unless named."""

    report_to: Annotated[tuple[TrackerName, ...], Several, BeforeValidator(_none_of_them)] = Field(
        default=(),
        description="any of tensorboard, wandb, mlflow, trackio, as in `[tensorboard]`; each needs "
        "its package, as in `pip install 'fluxtrain[wandb]'`",
    )
    project: Words = Field(
        default="fluxtrain", description="project of wandb and trackio, experiment of mlflow"
    )
    name: Words | None = Field(
        default=None, description="the run's name in trackers; left out, that of its directory"
    )
    offline: bool = Field(
        default=False,
        description="wandb writes below the run directory and connects to nothing; `wandb sync` "
        "uploads it later; the others write locally unless their own settings name a server",
    )
