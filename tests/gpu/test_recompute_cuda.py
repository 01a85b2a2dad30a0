"""What a block computes again on a GPU has the bits of what it keeps, and leaves nothing behind."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama import modeling_llama

from fluxtrain.core.wrap.engine import Engine, engine_of
from fluxtrain.models.kernels import Kernels, choose_kernels
from tests.wrap_with import wrap_with

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]

LAYERS, ROWS, TOKENS = 4, 8, 512


@pytest.fixture(autouse=True)
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True, warn_only=True)
    plain = dict(vars(modeling_llama))
    yield
    vars(modeling_llama).update(plain)  # liger's classes and rotary embedding replace them there
    torch.use_deterministic_algorithms(False)
    gc.enable()


class Training:
    """Blocks of which each saves some hundred megabytes a batch."""

    def __init__(self, kernels: Kernels, **placement: Any) -> None:
        torch.manual_seed(0)
        config = LlamaConfig(
            hidden_size=1024, intermediate_size=2816, num_hidden_layers=LAYERS,
            num_attention_heads=8, num_key_value_heads=8, vocab_size=1024,
            max_position_embeddings=TOKENS,
        )  # fmt: skip
        self.model = LlamaForCausalLM(config).to(torch.bfloat16).train()
        choose_kernels(kernels, self.model, "cuda")
        wrap_with(
            self.model, device="cuda", chunk_rows=4, overlap=True, **placement,
        )  # fmt: skip
        self.engine: Engine = engine_of(self.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.losses: list[Tensor] = []

    def steps(self, count: int) -> list[Tensor]:
        for _ in range(count):
            torch.manual_seed(len(self.losses))
            ids = torch.randint(0, 1024, (ROWS, TOKENS))
            loss = self.model(input_ids=ids, labels=ids, use_cache=False).loss
            loss.backward()
            self.engine.clip_grad_norm(0.3)
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.losses.append(loss.detach())
        return self.losses


@pytest.mark.parametrize("kernels", ["torch", "auto"])
@pytest.mark.parametrize(
    "placement",
    [
        {"offload": "none"},
        {"offload": "weights", "device_groups": 0, "resident_blocks": LAYERS},
        {"offload": "weights", "device_groups": 2, "resident_blocks": 1, "activations": "host"},
    ],
)
def test_kept_activations_give_the_bits_of_recomputed_ones(
    kernels: Kernels, placement: dict[str, Any]
) -> None:
    again, kept = (
        Training(kernels, **placement),
        Training(kernels, blocks_without_recompute=3, **placement),
    )
    assert sum(not unit.recomputes for unit in kept.engine.units) > 0
    assert torch.equal(torch.stack(again.steps(6)), torch.stack(kept.steps(6)))
    assert not any(unit.records_again for unit in again.engine.units)  # they end early
    for one, other in zip(again.model.parameters(), kept.model.parameters(), strict=True):
        assert torch.equal(one.detach().cpu(), other.detach().cpu())
