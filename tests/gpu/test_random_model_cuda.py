"""Models of the benchmarks have the same weights wherever they are to stand."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from transformers import Qwen2Config

sys.path.insert(0, str(Path(__file__).parents[2] / "bench"))
from random_model import random_model

pytestmark = pytest.mark.gpu
CUDA, CPU = torch.device("cuda"), torch.device("cpu")
SHAPE = {
    "hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 8,
    "num_attention_heads": 8, "num_key_value_heads": 2, "vocab_size": 4096,
}  # fmt: skip


def test_weights_made_on_the_gpu_are_the_same_on_the_host_which_holds_them_alone() -> None:
    config = Qwen2Config(**SHAPE, tie_word_embeddings=False)
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    at_home = random_model(config, CPU, CUDA)
    held_bytes = torch.cuda.max_memory_allocated() - before
    largest_bytes = max(weight.nbytes for weight in at_home.parameters())
    assert held_bytes <= 2 * largest_bytes
    assert held_bytes < sum(weight.nbytes for weight in at_home.parameters()) / 4
    on_gpu = random_model(config, CUDA, CUDA)
    for (name, one), other in zip(at_home.named_parameters(), on_gpu.parameters(), strict=True):
        assert one.device.type == "cpu" and other.is_cuda, name
        assert torch.equal(one, other.cpu()), name
    rotary = on_gpu.model.rotary_emb.inv_freq
    assert rotary.is_cuda and torch.equal(rotary.cpu(), at_home.model.rotary_emb.inv_freq)
