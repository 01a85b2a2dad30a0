"""`fluxtrain sample`: an image of a run's model, made from a picture and words."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import fluxtrain
from fluxtrain.core.wrap.engine import engine_of
from fluxtrain.data.images.pairs import Pair, Picture, picture_of
from fluxtrain.data.images.pictures import (
    BadPicture,
    bucket_for,
    buckets_of,
    decode,
    save_png,
    size_of,
)
from fluxtrain.errors import BadInput
from fluxtrain.events.answers.answers import SampleAnswer
from fluxtrain.events.run_folder.run_dir import RunDir, find_run
from fluxtrain.machine.gpu import check_accelerator
from fluxtrain.methods.image.adapter import LORA_FILE, load_adapter
from fluxtrain.methods.image.encoding import encode, encodings_of, load_parts
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
    is_full = config.method.name == "full"
    if not (run_dir.model / ("transformer" if is_full else LORA_FILE)).exists():
        raise BadInput(
            f"{run_dir.path} has saved no model yet: go on with `fluxtrain train --resume "
            f"{run_dir.path}`"
        )
    started_s = time.monotonic()
    asked: Any = request.device or "auto"
    cuda = torch.cuda.is_available(), asked
    device = torch.device(check_accelerator(*cuda, torch_cuda_version=torch.version.cuda).value)
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else None
    pipeline = open_pipeline(config.model.path)
    trained = PipelineFolder(run_dir.model) if is_full else pipeline
    empty = open_transformer(trained, ModelSource.of(config.model, capability))
    image = config.image
    encodings = encodings_of(pipeline, empty.precision.dtype, image.caption_tokens, image.cache)
    pair = _pair(request, image.size)
    encode(encodings, [pair], device, tell)
    tell("loading the transformer")
    model = load_transformer(trained, empty).requires_grad_(False)
    if not is_full:
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
    save_png(pixels_of(load_parts(encodings, "vae").vae, made, device), request.to)
    width, height = pair.bucket
    return SampleAnswer(
        path=str(request.to), width=width, height=height, seconds=time.monotonic() - started_s
    )


def _pair(request: SampleRequest, side: int) -> Pair:
    """Return the reference with its prompt at the run's size; without one a square."""
    bucket, references = (side, side), tuple[Picture, ...]()
    if request.reference is not None:
        try:
            bucket = bucket_for(*size_of(request.reference), buckets_of(side))
            decode(request.reference)  # not only its header
            references = (picture_of(request.reference),)
        except BadPicture as error:
            raise BadInput(str(error)) from None
    image = references[0] if references else Picture(Path(), "")  # of which nothing is encoded
    return Pair(image=image, references=references, prompt=request.prompt, mask=None, bucket=bucket)
