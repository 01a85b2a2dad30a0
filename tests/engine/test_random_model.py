"""Models of the GPU benchmarks: made without ever being whole on the device that makes them."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

sys.path.insert(0, str(Path(__file__).parents[2] / "bench"))
from random_model import SPREAD, random_model

CPU = torch.device("cpu")
TINY = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 320, "max_position_embeddings": 128,
}  # fmt: skip


def config(*, tied: bool) -> Qwen2Config:
    return Qwen2Config(**TINY, tie_word_embeddings=tied)


def tiny(*, tied: bool = True, seed: int = 0) -> Qwen2ForCausalLM:
    return random_model(config(tied=tied), CPU, CPU, seed)


@pytest.mark.parametrize("tied", [True, False])
def test_logits_are_those_of_a_model_that_was_loaded_with_its_weights(tied: bool) -> None:
    model = tiny(tied=tied)
    other = Qwen2ForCausalLM(config(tied=tied)).bfloat16()
    other.model.rotary_emb = type(other.model.rotary_emb)(other.config)  # fp32, as a load leaves it
    other.load_state_dict(model.state_dict())
    ids = torch.arange(100).view(2, 50)
    assert torch.equal(model(input_ids=ids).logits, other.train()(input_ids=ids).logits)


def test_tied_weights_are_one_tensor_and_others_two() -> None:
    model, apart = tiny(), tiny(tied=False)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert not torch.equal(apart.lm_head.weight, apart.model.embed_tokens.weight)


def test_a_seed_gives_the_same_weights_again_and_another_one_others() -> None:
    first, second, other = tiny(), tiny(), tiny(seed=1)
    for (name, one), two in zip(first.named_parameters(), second.parameters(), strict=True):
        assert torch.equal(one, two), name
    assert not torch.equal(first.lm_head.weight, other.lm_head.weight)


def test_matrices_are_random_norms_ones_and_biases_zeros_in_bf16() -> None:
    for name, weight in tiny(tied=False).named_parameters():
        assert weight.dtype == torch.bfloat16 and weight.requires_grad and not weight.is_meta, name
        if name.endswith("bias"):
            assert not weight.any(), name
        elif "norm" in name:
            assert (weight == 1).all(), name
        else:
            assert 0.8 * SPREAD < weight.float().std() < 1.2 * SPREAD, name


def test_positions_keep_their_width_and_training_is_on() -> None:
    model = tiny()
    assert model.training
    assert model.model.rotary_emb.inv_freq.dtype == torch.float32
    assert model.model.rotary_emb.inv_freq[0] == 1.0
    assert not any(buffer.is_meta for buffer in model.buffers())
