"""Trains LoRA on a FLUX.1 Kontext transformer of the real size and random weights, on one GPU.

`--engine flux` streams through a budget, `--engine resident` keeps all on the GPU. Prints a JSON
row: seconds a step, peak GiB of the device, rows a second. Encodings are random, so that neither
VAE nor text encoders are needed: this measures the transformer's loop alone.

    python bench/bench_flux.py --engine flux --budget-gib 11 --size 1024
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
import zlib
from typing import Any

import torch
from bench_gpu import cap_memory
from diffusers import FluxTransformer2DModel
from memory_watch import GIB

import fluxtrain
from fluxtrain.config.image_settings import ImageSettings
from fluxtrain.config.schema import MethodSettings
from fluxtrain.core.wrap.engine import engine_of
from fluxtrain.methods.image.adapter import attach
from fluxtrain.methods.image.flow import FlowMatching, PairBatch

WORDS, WIDTH, POOLED = 512, 4096, 768
SHAPE = {
    "num_layers": 19, "num_single_layers": 38, "attention_head_dim": 128, "in_channels": 64,
    "num_attention_heads": 24, "joint_attention_dim": WIDTH, "pooled_projection_dim": POOLED,
    "guidance_embeds": True, "patch_size": 1,
}  # fmt: skip
SPREAD = 0.02  # standard deviation of the weights


def transformer() -> Any:
    """Make the model on the host in bf16; its weights are ranges of one pool of random numbers."""
    with torch.device("meta"):
        model: Any = FluxTransformer2DModel(**SHAPE)
    pool = (torch.randn(1 << 28) * SPREAD).bfloat16()
    state = {}
    for name, parameter in model.named_parameters():
        first = zlib.crc32(name.encode()) % (len(pool) - parameter.numel())
        state[name] = pool[first : first + parameter.numel()].view(parameter.shape).clone()
    model.load_state_dict(state, assign=True)
    return model


def batch(rows: int, size: int) -> PairBatch:
    """Return pairs of random encodings."""
    latents = torch.randn(rows, 2, 16, size // 8, size // 8).bfloat16()
    return PairBatch(
        target=latents[:, 0], references=latents[:, 1:],
        weights=torch.ones(rows, (size // 16) ** 2),
        words=torch.randn(rows, WORDS, WIDTH).bfloat16(),
        pooled=torch.randn(rows, POOLED).bfloat16(),
    )  # fmt: skip


def main() -> None:
    """Measure one engine at one size."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--engine", choices=("flux", "resident"), default="flux")
    parser.add_argument("--budget-gib", type=float)
    parser.add_argument("--size", type=int, default=1024)
    parser.add_argument("--rows", type=int, default=1)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--frozen", choices=("plain", "nf4-double"), default="plain")
    parser.add_argument("--steps", type=int, default=8)
    asked = parser.parse_args()
    torch.manual_seed(0)
    if asked.budget_gib:
        cap_memory(asked.budget_gib)
    model = transformer()
    attach(model, MethodSettings(name="lora", rank=asked.rank))
    streams = asked.engine == "flux"
    where: dict[str, Any] = {"budget_gib": asked.budget_gib} if streams else {"offload": "none"}
    fluxtrain.wrap(model, device="cuda", frozen=asked.frozen, overlap=True, **where)
    objective = FlowMatching(
        image=ImageSettings(caption_dropout=0.0), has_guidance=True, dtype=torch.bfloat16,
        empty=(torch.zeros(WORDS, WIDTH), torch.zeros(POOLED)),
    )  # fmt: skip
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-4)
    pairs, seconds = batch(asked.rows, asked.size), []
    torch.cuda.reset_peak_memory_stats()
    for _ in range(asked.steps):
        started_s = time.perf_counter()
        loss = objective.loss(model, pairs, asked.rows)
        loss.backward()
        engine_of(model).clip_grad_norm(1.0)
        optimizer.step()
        optimizer.zero_grad()
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - started_s)
    step_s = statistics.median(seconds[2:] or seconds)
    row = {
        **vars(asked), "step_s": step_s, "rows_per_s": asked.rows / step_s,
        "loss": float(loss.detach()), "device_peak_gib": torch.cuda.max_memory_allocated() / GIB,
    }  # fmt: skip
    print(json.dumps(row))


if __name__ == "__main__":
    main()
