"""The base of every group of settings, and the groups of trackers and samples."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationInfo, field_validator

from fluxtrain.plan.request import Positive, refuse_boolean, refuse_uncountable


def _several(value: Any) -> Any:
    """Read `a` as a list of one, and `a, b` of two, as a command line gives them."""
    if not isinstance(value, str):
        return value
    return [name.strip() for name in value.split(",") if name.strip()]


Several = BeforeValidator(_several)  # of a list of names that has no comma in any of them


class Section(BaseModel):
    """A group of settings; unknown keys and values out of bounds are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True)

    @field_validator("*", mode="before")
    @classmethod
    def _no_boolean_for_a_number(cls, value: Any, info: ValidationInfo) -> Any:
        field = cls.model_fields[info.field_name or ""]
        return value if field.annotation is bool else refuse_boolean(value)

    @field_validator("*")
    @classmethod
    def _within_what_can_be_counted(cls, value: Any) -> Any:
        return refuse_uncountable(value)


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


PromptText = Annotated[str, Field(min_length=1)]


class SampleSettings(Section):
    """Prompts that the model answers at intervals while it trains, and before its first step."""

    prompts: PromptText | tuple[PromptText, ...] = Field(
        default=(),
        description="a list of prompts, or the path of a file with one a line; of .jsonl, each "
        "line is a JSON string, or an object with `prompt` or `messages`; none: nothing is sampled",
    )
    every: Positive | Literal["evaluation"] = Field(
        default="evaluation",
        description="steps between samples, or after each evaluation; all prompts are answered in "
        "one batch, a pass over the model a token",
    )
    max_new_tokens: Positive = Field(default=64, description="tokens of an answer, at most")
    temperature: float = Field(
        default=0.0,
        ge=0,
        le=100,
        allow_inf_nan=False,
        description="0 takes the most likely token each time, so that samples differ only by what "
        "was trained on; above, tokens are drawn, from the same seed each time",
    )
    form: Literal["auto", "chat", "text"] = Field(
        default="auto",
        description="chat: a prompt is a user's words in the model's chat template; text: it is "
        "continued as it is; auto is chat where the model has a template and learns conversations",
    )

    def are_due(self, step: int, total_steps: int, *, evaluated: bool) -> bool:
        """Return whether samples are made after `step`: after the last one, too."""
        if self.every == "evaluation":
            return evaluated
        return step >= total_steps or step % self.every == 0
