"""The objective of flow matching on pairs of images.

A target x and noise e make x_t = (1 - t) x + t e, of which the model, beside the reference, is to
predict e - x (Lipman et al. 2022, https://arxiv.org/abs/2210.02747; FLUX.1 Kontext,
https://arxiv.org/abs/2506.15742).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from math import exp
from typing import Any, Literal

import torch
from torch import Tensor, nn

from fluxtrain.config.image_settings import ImageSettings
from fluxtrain.methods.objective import choose_attention

# the shift of noise levels by the count of the target's tokens, as the pipeline's scheduler has it
_FEW_TOKENS, _FEW_SHIFT = 256, 0.5
_MANY_TOKENS, _MANY_SHIFT = 4096, 1.15
Timesteps = Literal["shifted", "uniform"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PairBatch:
    """Encoded pairs of one size: h and w are an eighth of the pixels."""

    target: Tensor  # latents, (B, 16, h, w)
    references: Tensor  # (B, R, 16, h, w); R may be 0
    weights: Tensor  # of the target's tokens, (B, h w / 4)
    words: Tensor  # T5's encoding of the prompts, (B, T, width)
    pooled: Tensor  # CLIP's, (B, width)
    levels: Tensor | None = None  # of noise, from 0 to 1, (B,); None: drawn
    noise: Tensor | None = None  # as `target`; None: drawn


def packed(latents: Tensor) -> Tensor:
    """Return latents (B, C, h, w) as tokens (B, h w / 4, 4 C)."""
    b, c, h, w = latents.shape
    cut = latents.reshape(b, c, h // 2, 2, w // 2, 2)
    return cut.permute(0, 2, 4, 1, 3, 5).reshape(b, h * w // 4, 4 * c)


def positions(height: int, width: int, images: int) -> Tensor:
    """Return the positions of the tokens of `images` images of latents (height, width), the target
    first: (images height width / 4, 3)."""
    rows, columns = height // 2, width // 2
    grid = torch.zeros(images, rows, columns, 3)
    grid[..., 0] = torch.arange(images)[:, None, None]
    grid[..., 1] = torch.arange(rows)[None, :, None]
    grid[..., 2] = torch.arange(columns)
    return grid.reshape(-1, 3)


def shifted(levels: Tensor, tokens: int) -> Tensor:
    """Move levels of noise towards 1 for larger images, which noise hides less."""
    slope = (_MANY_SHIFT - _FEW_SHIFT) / (_MANY_TOKENS - _FEW_TOKENS)
    factor = exp(_FEW_SHIFT + slope * (tokens - _FEW_TOKENS))
    return factor * levels / (1 + (factor - 1) * levels)


def level_at(quantile: float, timesteps: Timesteps, tokens: int) -> float:
    """Return the level of noise below which a share of all drawn ones lies."""
    share = torch.tensor(quantile, dtype=torch.float64)
    if timesteps == "uniform":
        return float(share)
    return float(shifted(torch.sigmoid(torch.special.ndtri(share)), tokens))


@dataclass(frozen=True, kw_only=True)
class FlowMatching:
    """The mean square error of the predicted flow, each pair weighing the same."""

    image: ImageSettings  # how noise is drawn, and the guidance
    has_guidance: bool  # the model is told the guidance
    dtype: torch.dtype  # of the model's inputs
    empty: tuple[Tensor, Tensor]  # words (T, width) and pooled (width,) of the empty prompt

    unit = "pairs"

    def count(self, batch: PairBatch) -> int:
        """Count the pairs."""
        return len(batch.target)

    def rows(self, batch: PairBatch) -> int:
        """Count the pairs."""
        return len(batch.target)

    def tokens(self, batch: PairBatch) -> int:
        """Count the tokens of words, targets and references."""
        images = 1 + batch.references.shape[1]
        return len(batch.target) * (batch.words.shape[1] + batch.weights.shape[1] * images)

    def loss(self, model: nn.Module, batch: PairBatch, step_count: int) -> Tensor:
        """Compute the sum of the pairs' mean square errors, divided by `step_count` pairs."""
        return self._errors(model, self._drawn(batch)).sum() / step_count

    def metrics(self, model: nn.Module, batch: PairBatch) -> Mapping[str, float]:
        """Compute the mean over the pairs, with the noise that the batch holds."""
        return {"loss": float(self._errors(model, batch).mean())}

    def to(self, batch: PairBatch, device: torch.device) -> PairBatch:
        """Copy all tensors to `device`."""
        held = {field.name: getattr(batch, field.name) for field in fields(batch)}
        return replace(batch, **{n: t.to(device) for n, t in held.items() if t is not None})

    def _drawn(self, batch: PairBatch) -> PairBatch:
        """Draw levels and noise, and which prompts are left out, on the CPU."""
        source = torch.default_generator
        count, tokens = len(batch.target), batch.weights.shape[1]
        if self.image.timesteps == "uniform":
            levels = torch.rand(count, generator=source)
        else:
            levels = shifted(torch.sigmoid(torch.randn(count, generator=source)), tokens)
        noise = torch.randn(batch.target.shape, generator=source)
        left_out = torch.rand(count, generator=source) < self.image.caption_dropout
        words, pooled = (
            torch.where(left_out.view(-1, *[1] * none.dim()).to(given.device),
                        none.to(given.device), given)
            for given, none in zip((batch.words, batch.pooled), self.empty, strict=True)
        )  # fmt: skip
        device = batch.target.device
        drawn = {"levels": levels.to(device), "noise": noise.to(device)}
        return replace(batch, words=words, pooled=pooled, **drawn)

    def _errors(self, model: nn.Module, batch: PairBatch) -> Tensor:
        """Return the mean square error of each pair, weighted over its tokens: (B,), fp32."""
        choose_attention(None)
        assert batch.levels is not None and batch.noise is not None, "drawn, or of the batch"
        target, noise = batch.target.float(), batch.noise.float()
        level = batch.levels.view(-1, 1, 1, 1)
        noisy = ((1 - level) * target + level * noise).to(self.dtype)
        images = [noisy, *batch.references.to(self.dtype).unbind(1)]
        hidden = torch.cat([packed(image) for image in images], dim=1)
        _, _, height, width = target.shape
        device = hidden.device
        guidance = torch.full((len(target),), self.image.guidance, device=device)
        known: Any = model
        flow: Tensor = known(
            hidden_states=hidden,
            timestep=batch.levels,
            guidance=guidance if self.has_guidance else None,
            pooled_projections=batch.pooled.to(self.dtype),
            encoder_hidden_states=batch.words.to(self.dtype),
            txt_ids=torch.zeros(batch.words.shape[1], 3, device=device),
            img_ids=positions(height, width, len(images)).to(device),
            return_dict=False,
        )[0]
        wanted = packed(noise - target).to(flow.device)
        errors = (flow[:, : wanted.shape[1]].float() - wanted).square().mean(-1)
        weights = batch.weights.to(errors.device)
        return (errors * weights).sum(-1) / weights.sum(-1)
