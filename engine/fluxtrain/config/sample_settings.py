"""The settings of samples: prompts that the model answers while it trains."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from fluxtrain.config.section import Section
from fluxtrain.plan.request import Positive

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
