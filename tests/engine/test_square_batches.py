"""Batches with as many rows as each has tokens: what is a mask, and what carries the batch?"""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

import fluxtrain
from fluxtrain.core.wrap.engine import engine_of

SIDE = 8


def llama() -> nn.Module:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=96, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=2,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def test_positions_carry_the_batch(caplog: pytest.LogCaptureFixture) -> None:
    found = []
    for chunk_rows in (SIDE, 2):
        model = fluxtrain.wrap(llama(), device="cpu", offload="weights", chunk_rows=chunk_rows)
        ids = torch.randint(0, 96, (SIDE, SIDE), generator=torch.Generator().manual_seed(1))
        positions = torch.arange(SIDE).expand(SIDE, SIDE).contiguous()
        positions[3:, 4:] -= 4  # rows of two documents
        with caplog.at_level(logging.WARNING, logger="fluxtrain"):
            model(input_ids=ids, position_ids=positions, labels=ids).loss.backward()
        found.append([p.grad.clone() for p in model.parameters()])
        assert any(unit.chunkable for unit in engine_of(model).units) == (chunk_rows < SIDE)
    assert "whole batch" not in caplog.text
    for whole, chunked in zip(*found, strict=True):
        assert torch.allclose(whole, chunked, rtol=1e-4, atol=1e-6)


class Mixes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: Tensor, table: Tensor) -> Any:
        return self.inner(torch.einsum("st,bth->bsh", table, x))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layers = nn.ModuleList(Mixes() for _ in range(2))

    def forward(self, x: Tensor, table: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x, table)
        return x


def test_what_may_be_a_mask_is_named(caplog: pytest.LogCaptureFixture) -> None:
    x, table = torch.randn(SIDE, SIDE, 4), torch.rand(SIDE, SIDE)
    plain = Net()
    plain(x, table).square().mean().backward()
    model = fluxtrain.wrap(Net(), device="cpu", offload="weights", chunk_rows=2)
    with caplog.at_level(logging.WARNING, logger="fluxtrain"):
        model(x, table).square().mean().backward()
    assert "the argument table of layers.0 is 8 x 8" in caplog.text
    for a, b in zip(plain.parameters(), model.parameters(), strict=True):
        assert torch.allclose(a.grad, b.grad, rtol=1e-5, atol=1e-7)
