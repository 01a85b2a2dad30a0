"""Models of a configuration with random weights, the same wherever they are to stand."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import Qwen2Config, Qwen2ForCausalLM

SPREAD = 0.02  # standard deviation of the weights


def random_model(
    config: Qwen2Config, target: torch.device, made_on: torch.device, seed: int = 0
) -> Qwen2ForCausalLM:
    """The model in bf16 on `target`. Its weights are made one at a time on `made_on`, which never
    holds more than one of them: a generator gives the same numbers on one kind of device alone."""
    config._attn_implementation = "sdpa"
    previous = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("meta"):
            model = Qwen2ForCausalLM(config)
    finally:
        torch.set_default_dtype(previous)
    model.to_empty(device=target)
    model.tie_weights()  # `to_empty` gave each name memory of its own
    rotary = type(model.model.rotary_emb)(config)  # buffers of no checkpoint: they are computed
    model.model.rotary_emb = rotary.to(target)
    generator = torch.Generator(made_on).manual_seed(seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            fill(name, weight, generator)
    if made_on.type == "cuda":
        torch.cuda.empty_cache()
    return model.train()


def fill(name: str, weight: Tensor, generator: torch.Generator) -> None:
    """Zeros for a bias, ones for a norm, normal numbers for a matrix."""
    if name.endswith("bias"):
        weight.zero_()
    elif weight.dim() == 1:
        weight.fill_(1.0)
    else:
        made = torch.empty(weight.shape, dtype=weight.dtype, device=generator.device)
        weight.copy_(made.normal_(0.0, SPREAD, generator=generator))
