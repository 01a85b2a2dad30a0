"""`fluxtrain sample`: an image of a run's model, made from a picture and words."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import fluxtrain
from fluxtrain.config.schema import RunConfig
from fluxtrain.core.wrap.engine import engine_of
from fluxtrain.data.images.buckets import bucket_for, buckets_of
from fluxtrain.data.images.pairs import Pair, Picture, picture_of
from fluxtrain.data.images.pictures import BadPicture, save_png, size_of
from fluxtrain.errors import BadInput
from fluxtrain.events.answers.answers import SampleAnswer
from fluxtrain.events.run_folder.run_dir import RunDir, find_run
from fluxtrain.machine.gpu import check_accelerator
from fluxtrain.methods.image.adapter import LORA_FILE, load_adapter
from fluxtrain.methods.image.encoding import encode, encodings_of, load_vae
from fluxtrain.methods.image.sampling import Request, pixels_of, sampled
from fluxtrain.models.loading import ModelSource
from fluxtrain.models.model_files import is_pipeline
from fluxtrain.models.pipeline import (
    load_transformer,
    open_pipeline,
    open_transformer,
)
from fluxtrain.models.pipeline_files import PipelineFolder
from fluxtrain.train.checkpoint.recovery import stored_config

Tell = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class SampleRequest:
    """What `fluxtrain sample` is asked for; None: as the run made its samples."""

    run: str
    prompt: str
    reference: Path | None  # None: the image is made from the words alone
    to: Path
    steps: int | None = None
    guidance: float | None = None
    seed: int = 0
    device: str | None = None


def sample(request: SampleRequest, tell: Tell) -> SampleAnswer:
    """Make an image and write it as PNG; encoders, transformer and VAE are loaded one by one.

    Raises BadInput for a run that is none of images or has saved no model, and for a reference
    that cannot be used.
    """
    run_dir = RunDir(find_run(request.run))
    config = stored_config(run_dir)
    if not is_pipeline(config.model.path):
        raise BadInput(f"{run_dir.path} is a run of text: use `fluxtrain generate` for it")
    _refuse_unsaved(config, run_dir)
    started_s = time.monotonic()
    asked: Any = request.device or "auto"
    found = check_accelerator(
        torch.cuda.is_available(), asked, torch_cuda_version=torch.version.cuda
    )
    device = torch.device(found.value)
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else None
    pipeline = open_pipeline(config.model.path)
    source = ModelSource.of(config.model, capability)
    empty = open_transformer(_trained(config, pipeline, run_dir), source)
    dtype, image = empty.precision.dtype, config.image
    encodings = encodings_of(pipeline, dtype, image.caption_tokens, image.cache)
    pair = _pair(request, image.size)
    encode(encodings, [pair], device, tell)
    tell("loading the transformer")
    model = load_transformer(_trained(config, pipeline, run_dir), empty).requires_grad_(False)
    if config.method.name != "full":
        load_adapter(model, run_dir.model)
    model.eval()
    if device.type == "cuda":
        model = fluxtrain.wrap(model, device=device)
    tell("making the image")
    how = Request(
        encodings=encodings, pair=pair, steps=request.steps or image.sample_steps,
        guidance=image.sample_guidance if request.guidance is None else request.guidance,
        seed=request.seed,
    )  # fmt: skip
    made = sampled(model, how, device)
    if device.type == "cuda":
        engine_of(model).close()
    del model
    save_png(pixels_of(load_vae(pipeline, dtype), made, device), request.to)
    width, height = pair.bucket
    return SampleAnswer(
        path=str(request.to), width=width, height=height, seconds=time.monotonic() - started_s
    )


def _trained(config: RunConfig, pipeline: PipelineFolder, run_dir: RunDir) -> PipelineFolder:
    """Return where the transformer is: of full training, in the run."""
    return PipelineFolder(run_dir.model) if config.method.name == "full" else pipeline


def _refuse_unsaved(config: RunConfig, run_dir: RunDir) -> None:
    needed = run_dir.model / ("transformer" if config.method.name == "full" else LORA_FILE)
    if not needed.exists():
        raise BadInput(
            f"{run_dir.path} has saved no model yet: go on with `fluxtrain train --resume "
            f"{run_dir.path}`"
        )


def _pair(request: SampleRequest, side: int) -> Pair:
    """Return the reference with its prompt at the run's size; without one a square."""
    buckets = buckets_of(side)
    if request.reference is None:
        nothing: Any = Picture(Path(), "")
        return Pair(
            image=nothing, references=(), prompt=request.prompt, mask=None, bucket=(side, side),
            where="--prompt",
        )  # fmt: skip
    try:
        bucket = bucket_for(*size_of(request.reference), buckets)
        picture = picture_of(request.reference)
    except BadPicture as error:
        raise BadInput(f"{request.reference} {error}") from None
    return Pair(
        image=picture, references=(picture,), prompt=request.prompt, mask=None, bucket=bucket,
        where=str(request.reference),
    )  # fmt: skip
