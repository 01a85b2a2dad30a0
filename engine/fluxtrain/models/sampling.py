"""Generates a few words from the model, to show what it has learnt."""

from __future__ import annotations

from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from fluxtrain.models.stopping import stops_of


def sample_text(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompt: str,
    max_new_tokens: int = 48,
    seed: int | None = None,
) -> str:
    """Return the prompt and its continuation; greedy without a seed, sampled with one.

    Training mode and the global random state are restored. Wait for pending updates before the
    call.
    """
    encoded = tokenizer(prompt, return_tensors="pt")
    encoded = {name: encoded[name] for name in ("input_ids", "attention_mask")}
    settings = GenerationConfig(  # type: ignore[no-untyped-call]
        max_new_tokens=max_new_tokens,
        do_sample=seed is not None,
        eos_token_id=stops_of(model.generation_config) or tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id
        if tokenizer.pad_token_id is not None
        else tokenizer.eos_token_id,
        **({"temperature": 0.8, "top_p": 0.95} if seed is not None else {}),
    )
    was_training = model.training
    model.train(False)
    try:
        with torch.no_grad(), torch.random.fork_rng():
            torch.manual_seed(seed or 0)
            generate: Any = model.generate
            ids = generate(**encoded, generation_config=settings)
    finally:
        model.train(was_training)
    return str(tokenizer.decode(ids[0], skip_special_tokens=True))
