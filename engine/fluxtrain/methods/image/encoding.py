"""Encodes images and prompts once, into a cache that the training reads.

The encoders are loaded one after the other and freed before the transformer is loaded, so that
memory holds the largest of them and never the sum. Each image and each prompt is a file of its own:
a start that was killed goes on where it was, and the next start encodes nothing.
"""

from __future__ import annotations

import gc
import hashlib
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save
from torch import Tensor

import fluxtrain
from fluxtrain.core.device.heap import trim_heap
from fluxtrain.core.wrap.engine import engine_of
from fluxtrain.data.images.pairs import Pair, Picture, path_of
from fluxtrain.data.images.pictures import Bucket, cropped
from fluxtrain.errors import BadInput, ReadFailed
from fluxtrain.files.atomic import write_bytes
from fluxtrain.files.cache import cache_root
from fluxtrain.methods.objective import choose_attention
from fluxtrain.models.model_files import base_key
from fluxtrain.models.pipeline_files import PARTS, PipelineFolder, weights_of
from fluxtrain.models.quiet import quiet_diffusers

VERSION = 1  # raise it when the same image or prompt would be encoded otherwise
TOLD_EVERY_S = 1.0
_OPTION = "--set image.cache=FOLDER"  # names another disk
Tell = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class Encodings:
    """The cache of one pipeline's encodings, in one dtype and length of prompts."""

    pipeline: PipelineFolder
    dtype: str
    caption_tokens: int
    images: Path  # a folder for each VAE
    words: Path  # a folder for each pair of text encoders

    def latents_at(self, picture: Picture, bucket: Bucket) -> Path:
        """Return the file of an image's latents."""
        return self.images / f"{picture.digest}-{bucket[0]}x{bucket[1]}.safetensors"

    def words_at(self, prompt: str) -> Path:
        """Return the file of a prompt's encodings."""
        return self.words / f"{hashlib.sha256(prompt.encode()).hexdigest()}.safetensors"

    def latents(self, picture: Picture, bucket: Bucket) -> Tensor:
        """Read an image's latents: (16, height / 8, width / 8)."""
        return _read(self.latents_at(picture, bucket))["latents"]

    def prompt(self, prompt: str) -> tuple[Tensor, Tensor]:
        """Read a prompt's encodings: of T5 (tokens, width), and CLIP's (width,)."""
        found = _read(self.words_at(prompt))
        return found["words"], found["pooled"]

    def is_known(self, picture: Picture, bucket: Bucket) -> bool:
        """Return whether an image was encoded before."""
        return self.latents_at(picture, bucket).exists()


def encodings_of(
    pipeline: PipelineFolder, dtype: str, caption_tokens: int, cache: str
) -> Encodings:
    """Find the cache of a pipeline. Other weights of its encoders have another one."""
    root = cache_root() / "images" if cache == "auto" else Path(cache).expanduser()
    seen = _key(pipeline, ("vae",), dtype)
    told = ("text_encoder", "text_encoder_2", "tokenizer", "tokenizer_2")
    said = _key(pipeline, told, dtype, str(caption_tokens))
    return Encodings(
        pipeline=pipeline, dtype=dtype, caption_tokens=caption_tokens,
        images=root / f"latents-{seen}", words=root / f"prompts-{said}",
    )  # fmt: skip


def _key(pipeline: PipelineFolder, parts: Iterable[str], *how: str) -> str:
    digest = hashlib.sha256(repr((VERSION, how)).encode())
    for part in parts:
        folder = pipeline.folder / part
        if not part.startswith("tokenizer"):
            digest.update(base_key(weights_of(folder)).encode())
        for path in sorted(folder.iterdir()):
            if path.suffix in (".json", ".txt", ".model"):
                digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def encode(
    encodings: Encodings, pairs: Sequence[Pair], device: torch.device, tell: Tell
) -> tuple[int, int]:
    """Encode what is not in the cache yet; return how many images and prompts that were.

    `tell` is called with the progress, once a second.

    Raises NoSpace where the disk is full; what is encoded stays.
    """
    seen = dict.fromkeys((one, p.bucket) for p in pairs for one in p.pictures if one.digest)
    pictures = {encodings.latents_at(*what): what for what in seen if not encodings.is_known(*what)}
    said = {encodings.words_at(prompt): prompt for prompt in ("", *(p.prompt for p in pairs))}
    prompts = {path: prompt for path, prompt in said.items() if not path.exists()}
    tell = _now_and_then(tell)
    choose_attention(None)
    if pictures:
        _encode_pictures(encodings, pictures, device, tell)
    if prompts:
        _encode_prompts(encodings, prompts, device, tell)
    return len(pictures), len(prompts)


def _now_and_then(tell: Tell) -> Tell:
    last_s = 0.0

    def told(words: str) -> None:
        nonlocal last_s
        if time.monotonic() - last_s >= TOLD_EVERY_S:
            last_s = time.monotonic()
            tell(words)

    return told


def _encode_pictures(
    encodings: Encodings,
    pictures: dict[Path, tuple[Picture, Bucket]],
    device: torch.device,
    tell: Tell,
) -> None:
    made = load_parts(encodings, "vae").to(device)
    encodings.images.mkdir(parents=True, exist_ok=True)
    for number, (path, (picture, bucket)) in enumerate(pictures.items(), 1):
        tell(f"image {number:,} of {len(pictures):,} encoded")
        pixels = torch.from_numpy(cropped(path_of(picture), bucket)).permute(2, 0, 1)[None]
        with torch.no_grad():
            latents = made._encode_vae_image(pixels.to(device).to(made.vae.dtype) / 127.5 - 1, None)
        if not latents.isfinite().all():
            raise BadInput(
                f"{picture.path}: its latents are not finite in {encodings.dtype}: set "
                "model.dtype=bfloat16 or float32"
            )
        write_bytes(path, save({"latents": latents[0].cpu().contiguous()}), _OPTION)
    del made
    _free(device)


def load_parts(encodings: Encodings, *kept: str, kind: Any = None, **given: Any) -> Any:
    """Load the pipeline with these of its parts alone, whose code encodes and samples, beside
    `given` ones; `kind` is a class made from it."""
    from diffusers import FluxKontextPipeline

    parts = dict.fromkeys(part for part in PARTS if part not in kept) | given
    with quiet_diffusers():
        return (kind or FluxKontextPipeline).from_pretrained(
            encodings.pipeline.folder, local_files_only=True,
            dtype=getattr(torch, encodings.dtype), **parts,
        )  # fmt: skip


def _encode_prompts(
    encodings: Encodings, prompts: dict[Path, str], device: torch.device, tell: Tell
) -> None:
    """Encode with CLIP, then with T5, which streams to a GPU block by block; a file is written when
    it has both."""
    encodings.words.mkdir(parents=True, exist_ok=True)
    pooled = {}
    clip = load_parts(encodings, "text_encoder", "tokenizer").to(device)
    with torch.no_grad():
        for path, prompt in prompts.items():
            pooled[path] = clip._get_clip_prompt_embeds(prompt, device=device)[0].cpu()
    del clip
    _free(device)
    t5 = load_parts(encodings, "text_encoder_2", "tokenizer_2")
    model = t5.text_encoder_2.requires_grad_(False)
    if device.type == "cuda":
        t5.text_encoder_2 = fluxtrain.wrap(model, device=device, offload="max")
    dtype = getattr(torch, encodings.dtype)
    with torch.no_grad(), quiet_diffusers():
        for number, (path, prompt) in enumerate(prompts.items(), 1):
            tell(f"prompt {number:,} of {len(prompts):,} encoded")
            words = t5._get_t5_prompt_embeds(
                prompt, max_sequence_length=encodings.caption_tokens, device=device, dtype=dtype
            )
            found = {"words": words[0].cpu().contiguous(), "pooled": pooled[path].contiguous()}
            write_bytes(path, save(found), _OPTION)
    if device.type == "cuda":
        engine_of(t5.text_encoder_2).close()
    del t5, model
    _free(device)


def _free(device: torch.device) -> None:
    gc.collect()
    trim_heap()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def _read(path: Path) -> dict[str, Tensor]:
    try:
        return load_file(path)
    except Exception as error:  # safetensors has kinds of its own
        raise ReadFailed(
            f"{path} cannot be read ({' '.join(str(error).split())[:100]}): remove what is left of "
            "it, and the next start encodes it again"
        ) from error
