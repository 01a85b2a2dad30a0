"""Makes the image demo: its pairs, scenes of shapes each with one of four changes, and its
pipeline, FLUX.1 Kontext's parts in its own layout, but tiny.

The VAE is trained for a moment on the demo's images, because latents of a random one mean nothing;
all else starts from random weights.
"""

from __future__ import annotations

import json
import random
import string
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fluxtrain.data.images.pictures import cropped, pillow
from fluxtrain.files.atomic import replace_folder
from fluxtrain.files.cache import cache_root
from fluxtrain.models.quiet import quiet_diffusers

VERSION = 1  # raise it when the demo becomes another one
SIDE = 64  # pixels
PAIRS = 120
VAE_STEPS = 120
WIDTH = 32  # of the text encoders
LATENTS = 4  # channels
_COLOURS = ("navy", "teal", "olive", "maroon", "orange", "purple", "gray", "green")
_WORDS = ("invert", "the", "colors", "draw", "a", "circle", "make", "it", "red", "mirror", "image")


def demo_folder() -> Path:
    """Return the folder with the demo's `pipeline` and `data`, made in the cache where it is not
    there yet, in about a minute."""
    folder = cache_root() / f"demo-image-edit-{VERSION}"
    if not folder.exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        replace_folder(folder, _make)
    return folder


def _make(folder: Path) -> None:
    draw_pairs(folder / "data")
    drawn = [cropped(path, (SIDE, SIDE)) for path in sorted((folder / "data").glob("*.png"))]
    images = torch.from_numpy(np.stack(drawn)).permute(0, 3, 1, 2) / 127.5 - 1
    write_demo_pipeline(folder / "pipeline", images)


def write_demo_pipeline(folder: Path, images: Tensor | None = None) -> None:
    """Write a pipeline of random weights to `folder`, the same each time.

    images: (N, 3, height, width), from -1 to 1, on which its VAE is trained.
    """
    with quiet_diffusers(), torch.random.fork_rng(devices=[]):
        from diffusers import FlowMatchEulerDiscreteScheduler, FluxKontextPipeline

        torch.manual_seed(0)
        vae = _vae()
        if images is not None:
            _train(vae, images)
        clip, clip_tokens = _clip()
        t5, t5_tokens = _t5()
        made = FluxKontextPipeline(
            FlowMatchEulerDiscreteScheduler(shift=3.0, use_dynamic_shifting=True),
            vae, clip, clip_tokens, t5, t5_tokens, _transformer(),
        )  # fmt: skip
        made.save_pretrained(folder)


def _transformer() -> Any:
    from diffusers import FluxTransformer2DModel

    return FluxTransformer2DModel(
        patch_size=1, in_channels=4 * LATENTS, num_layers=2, num_single_layers=4,
        attention_head_dim=16, num_attention_heads=4, joint_attention_dim=WIDTH,
        pooled_projection_dim=WIDTH, guidance_embeds=True, axes_dims_rope=(4, 6, 6),
    )  # fmt: skip


def _vae() -> Any:
    from diffusers import AutoencoderKL

    return AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * 4, up_block_types=("UpDecoderBlock2D",) * 4,
        block_out_channels=(16, 16, 32, 32), layers_per_block=1, latent_channels=LATENTS,
        norm_num_groups=8, use_quant_conv=False, use_post_quant_conv=False,
        mid_block_add_attention=False, scaling_factor=1.0, shift_factor=0.0,
    )  # fmt: skip


def _train(vae: Any, images: Tensor) -> None:
    """Teach the VAE to give images back, and scale its latents to a mean of 0 and a variance
    of 1, which the noise has."""
    optimizer = torch.optim.AdamW(vae.parameters(), lr=3e-3)
    for _ in range(VAE_STEPS):
        batch = images[torch.randint(len(images), (8,), generator=torch.default_generator)]
        latents = vae.encode(batch).latent_dist.mode()
        loss = (vae.decode(latents).sample - batch).square().mean() + 1e-4 * latents.square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    with torch.no_grad():
        latents = vae.encode(images[:64]).latent_dist.mode()
    vae.register_to_config(
        shift_factor=float(latents.mean()), scaling_factor=float(1 / latents.std())
    )


def _clip() -> tuple[Any, Any]:
    from transformers import CLIPTextConfig, CLIPTextModel, CLIPTokenizer

    letters = [*string.ascii_lowercase, *string.digits]
    tokens = ["<|startoftext|>", "<|endoftext|>", *letters, *(f"{one}</w>" for one in letters)]
    vocabulary = {token: number for number, token in enumerate(tokens)}
    config = CLIPTextConfig(
        vocab_size=len(tokens), hidden_size=WIDTH, intermediate_size=2 * WIDTH,
        num_hidden_layers=2, num_attention_heads=4, projection_dim=WIDTH, bos_token_id=0,
        eos_token_id=1, pad_token_id=1,
    )  # fmt: skip
    model: Any = CLIPTextModel(config)
    return model.eval(), CLIPTokenizer(vocab=vocabulary, merges=[], model_max_length=77)


def _t5() -> tuple[Any, Any]:
    from transformers import T5Config, T5EncoderModel, T5Tokenizer

    pieces: Sequence[str] = ("▁", *(f"▁{word}" for word in _WORDS), *string.ascii_lowercase)
    scores = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), *((one, -2.0) for one in pieces)]
    tokenizer = T5Tokenizer(vocab=scores, extra_ids=0, model_max_length=512)
    config = T5Config(
        vocab_size=len(scores), d_model=WIDTH, d_kv=8, d_ff=2 * WIDTH, num_layers=2, num_heads=4,
        feed_forward_proj="gated-gelu",
    )  # fmt: skip
    model: Any = T5EncoderModel(config)
    return model.eval(), tokenizer


def draw_pairs(folder: Path, count: int = PAIRS) -> None:
    """Write `count` pairs below `folder`, with `pairs.jsonl`; the same ones each time."""
    pillow()
    drawn, changes = random.Random(0), _changes()
    folder.mkdir(parents=True, exist_ok=True)
    lines = []
    for number in range(count):
        prompt, change = changes[number % len(changes)]
        before = _scene(drawn)
        names = f"{number:03}-before.png", f"{number:03}-after.png"
        before.save(folder / names[0])
        change(before.copy()).save(folder / names[1])
        lines.append(json.dumps({"image": names[1], "reference": names[0], "prompt": prompt}))
    (folder / "pairs.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")


def _scene(drawn: random.Random) -> Any:
    from PIL import Image, ImageDraw

    scene = Image.new("RGB", (SIDE, SIDE), drawn.choice(("white", "lightgray", "beige")))
    pen = ImageDraw.Draw(scene)
    for _ in range(3):
        left, top = drawn.randrange(SIDE - 24), drawn.randrange(SIDE - 24)
        size = drawn.randrange(12, 32)
        shape = drawn.choice((pen.rectangle, pen.ellipse))
        shape((left, top, left + size, top + size), fill=drawn.choice(_COLOURS))
    return scene


def _changes() -> list[tuple[str, Callable[[Any], Any]]]:
    from PIL import ImageDraw, ImageOps

    def circled(scene: Any) -> Any:
        ImageDraw.Draw(scene).ellipse((12, 12, SIDE - 12, SIDE - 12), outline="black", width=4)
        return scene

    return [
        ("invert the colors", ImageOps.invert),
        ("draw a circle", circled),
        ("make it red", lambda one: ImageOps.colorize(ImageOps.grayscale(one), "black", "red")),
        ("mirror the image", ImageOps.mirror),
    ]
