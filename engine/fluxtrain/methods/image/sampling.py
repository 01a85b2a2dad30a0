"""Makes images with the pipeline's own sampler, through a transformer that may stream.

What a training learns from is encoded already, so that sampling needs no text encoder, and the VAE
only to turn latents into pixels.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fluxtrain.config.schema import RunConfig
from fluxtrain.data.images.pairs import Pair
from fluxtrain.data.images.pictures import cropped, save_png
from fluxtrain.errors import Interrupted, is_panic
from fluxtrain.events.emitter import Announcer
from fluxtrain.events.events import SampleGenerated
from fluxtrain.events.run_folder.own_files import SAMPLES
from fluxtrain.machine.failures import first_line
from fluxtrain.methods.image.encoding import Encodings, load_parts
from fluxtrain.methods.image.flow import packed, positions
from fluxtrain.methods.objective import choose_attention
from fluxtrain.models.quiet import quiet_diffusers

SEED = 0


@dataclass(frozen=True, kw_only=True)
class Request:
    """What an image is made from: the encodings of a pair's references and prompt."""

    encodings: Encodings
    pair: Pair
    steps: int
    guidance: float
    seed: int = SEED


def sampled(
    model: nn.Module,
    request: Request,
    device: torch.device,
    stopped: Callable[[], bool] = lambda: False,
) -> Tensor:
    """Make the latents of an image with `model`, which computes on `device`: (1, C, h, w).

    Where `stopped` comes true, what is there then is returned.
    """
    encodings, pair = request.encodings, request.pair
    width, height = pair.bucket
    words, pooled = encodings.prompt(pair.prompt)
    references = [encodings.latents(one, pair.bucket)[None] for one in pair.references]

    def look(made: Any, _step: int, _time: Any, values: dict[str, Any]) -> dict[str, Any]:
        made._interrupt = stopped()
        return values

    choose_attention(None)
    with quiet_diffusers(), torch.no_grad():
        made = _sampler(model, encodings, references[1:], device)
        tokens: Tensor = made(
            image=references[0] if references else None,
            prompt_embeds=words[None].to(device), pooled_prompt_embeds=pooled[None].to(device),
            height=height, width=width, max_area=height * width, _auto_resize=False,
            num_inference_steps=request.steps, guidance_scale=request.guidance,
            generator=torch.Generator().manual_seed(request.seed),
            max_sequence_length=len(words), output_type="latent", callback_on_step_end=look,
        ).images  # fmt: skip
        return made._unpack_latents(tokens, height, width, made.vae_scale_factor)  # type: ignore[no-any-return]


def _sampler(
    model: nn.Module, encodings: Encodings, further: Sequence[Tensor], device: torch.device
) -> Any:
    """Return the pipeline with `model` as its transformer and nothing else but the scheduler.

    further: latents of the references after the first.
    """
    from diffusers import FluxKontextPipeline

    class Sampler(FluxKontextPipeline):  # type: ignore[misc]
        @property
        def _execution_device(self) -> torch.device:
            return device  # weights may live on the host

        def prepare_latents(self, image: Any, *rest: Any) -> Any:
            latents, images, ids, image_ids = super().prepare_latents(image, *rest)
            if further:
                images = torch.cat([images, *(packed(one.to(latents)) for one in further)], dim=1)
                _, _, rows, columns = further[0].shape
                every = positions(rows, columns, len(further) + 2).to(ids)
                image_ids = every[every[:, 0] > 0]
            return latents, images, ids, image_ids

    made = load_parts(encodings, "scheduler", kind=Sampler, transformer=model)
    made.latent_channels = made.transformer.config.in_channels // 4
    made.set_progress_bar_config(disable=True)
    return made


def pixels_of(vae: Any, latents: Tensor, device: torch.device) -> Any:
    """Decode latents (1, C, h, w) to a Pillow image, on the host where `device` has no memory."""
    from PIL import Image

    scaled = latents / vae.config.scaling_factor + vae.config.shift_factor
    for place in dict.fromkeys((device, torch.device("cpu"))):
        try:
            with torch.no_grad():
                decoded = vae.to(place).decode(scaled.to(place, vae.dtype)).sample[0]
            break
        except torch.OutOfMemoryError:
            if place.type == "cpu":
                raise
        finally:
            vae.to("cpu")
    shown = ((decoded.float().clamp(-1, 1) + 1) * 127.5).round().to(torch.uint8)
    return Image.fromarray(shown.permute(1, 2, 0).cpu().numpy())


@dataclass
class PairSamples:
    """Makes images for the same held-out pairs whenever it is asked: PNG files in the run's folder
    that show reference, made image and target side by side."""

    config: RunConfig
    pairs: Sequence[Pair]
    encodings: Encodings
    model: nn.Module
    device: torch.device
    announcer: Announcer
    run_dir: Path
    vae: Any = None  # loaded with the first sample

    def __post_init__(self) -> None:
        self.pairs = self.pairs[: self.config.image.samples]

    def is_due(self, step: int, total_steps: int, *, evaluated: bool) -> bool:
        """Return whether images are made after `step`."""
        return bool(self.pairs) and self.config.samples.are_due(
            step, total_steps, evaluated=evaluated
        )

    def write(self, step: int, stopped: Callable[[], bool]) -> None:
        """Make an image for each pair with the weights after `step`, and report its file.

        Pending updates must be flushed before. What goes wrong ends the samples, with a warning,
        and not the training.
        """
        was_training = self.model.training
        self.model.eval()
        started_s, count = time.perf_counter(), len(self.pairs)
        try:
            for number, pair in enumerate(self.pairs, 1):
                path = f"{SAMPLES}/step-{step:08}-{number}.png"
                self._make(pair, number, self.run_dir / path, stopped)
                if stopped():
                    return
                self.announcer.emit(
                    SampleGenerated(
                        step=step, prompt=pair.prompt, text=path, number=number, count=count,
                        ended="end", seconds=time.perf_counter() - started_s, path=path,
                    )
                )  # fmt: skip
        except BaseException as error:
            fails = isinstance(error, Exception) and not isinstance(error, Interrupted)
            if not fails and not is_panic(error):
                raise
            told = f"no more samples are made, the training goes on: {first_line(error)}"
            self.announcer.warn(told)
            self.pairs = []
        finally:
            self.model.train(was_training)

    def _make(self, pair: Pair, number: int, path: Path, stopped: Callable[[], bool]) -> None:
        image = self.config.image
        request = Request(
            encodings=self.encodings, pair=pair, steps=image.sample_steps,
            guidance=image.sample_guidance, seed=SEED + number,
        )  # fmt: skip
        made = sampled(self.model, request, self.device, stopped)
        if stopped():
            return
        if self.vae is None:
            self.vae = load_parts(self.encodings, "vae").vae
        save_png(beside(pair, pixels_of(self.vae, made, self.device)), path)


def beside(pair: Pair, made: Any) -> Any:
    """Return one picture of a pair's first reference, the made image and the target."""
    from PIL import Image

    references = [cropped(one.path, pair.bucket) for one in pair.references[:1]]
    panels = [*references, np.asarray(made), cropped(pair.image.path, pair.bucket)]
    return Image.fromarray(np.concatenate(panels, axis=1))
