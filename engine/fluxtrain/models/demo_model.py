"""The demo's model: a Llama of a size that two CPU cores train in a minute."""

from __future__ import annotations

import torch
from transformers import LlamaConfig, LlamaForCausalLM

LAYERS = 6
HIDDEN = 192
SEQUENCE_LENGTH = 256


def demo_config(vocabulary: int) -> LlamaConfig:
    """Return a Llama with tied embeddings, grouped queries and a few million parameters."""
    return LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=HIDDEN,
        intermediate_size=3 * HIDDEN,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2 * SEQUENCE_LENGTH,
        initializer_range=0.06,  # at 0.02 the first hundred steps go into growing the weights
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=0,
        pad_token_id=0,
    )


def demo_model(
    vocabulary: int, seed: int = 0, dtype: torch.dtype = torch.float32
) -> LlamaForCausalLM:
    """Initialise a demo model, equal for equal seeds, without using the global RNG."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(demo_config(vocabulary))  # type: ignore[no-untyped-call]
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    model.config.dtype = dtype
    return model
