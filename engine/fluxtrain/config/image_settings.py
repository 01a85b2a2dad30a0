"""The settings of image editing: the size of images, the noise they are learned with, samples."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, field_validator

from fluxtrain.config.section import Section
from fluxtrain.plan.request import Positive

Share = Annotated[float, Field(ge=0, lt=1, allow_inf_nan=False)]
Guidance = Annotated[float, Field(ge=0, le=100, allow_inf_nan=False)]
MULTIPLE = 16  # pixels of a token


class ImageSettings(Section):
    """How images are learned, where model.path is the folder of an image pipeline."""

    size: Annotated[int, Field(ge=64, le=4096)] = Field(
        default=1024,
        description="side in pixels of the square whose area all images are scaled to, a multiple "
        "of 16; their shapes stay as near as FLUX.1 Kontext's 17 shapes are",
    )
    caption_tokens: Annotated[int, Field(ge=8, le=512)] = Field(
        default=512,
        description="tokens of a prompt for T5, padded or cut to this, as the pipeline does it "
        "(max_sequence_length); fewer are faster, and then samples need the same",
    )
    caption_dropout: Share = Field(
        default=0.05, description="share of the prompts that are replaced by the empty one"
    )
    timesteps: Literal["shifted", "uniform"] = Field(
        default="shifted",
        description="how levels of noise are drawn: the sigmoid of a normal, moved towards more "
        "noise for larger images as the sampler's are, or evenly from 0 to 1",
    )
    guidance: Guidance = Field(
        default=1.0, description="guidance that the model is told in training"
    )
    samples: Annotated[int, Field(ge=0, le=16)] = Field(
        default=2,
        description="held-out pairs whose images are made before the first step and after each "
        "evaluation (samples.every), as PNG files in the run",
    )
    sample_steps: Positive = Field(default=20, description="steps of the sampler for a sample")
    sample_guidance: Guidance = Field(default=2.5, description="guidance of a sample")
    cache: Annotated[str, Field(min_length=1)] = Field(
        default="auto",
        description="where encoded images and prompts are kept: auto is the user's cache, else a "
        "folder; about 1 MiB an image of a megapixel and 4 MiB a prompt of 512 tokens",
    )

    @field_validator("size")
    @classmethod
    def _whole_tokens(cls, size: int) -> int:
        if size % MULTIPLE:
            near = max(64, round(size / MULTIPLE) * MULTIPLE)
            raise ValueError(
                f"{size} is no multiple of {MULTIPLE}, the pixels of a token: use {near}"
            )
        return size
