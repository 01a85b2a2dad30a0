"""What the engine moves, holds and reports while it streams."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

import fluxtrain
from fluxtrain.core.device.device import Transfer
from fluxtrain.core.wrap.engine import Engine, engine_of
from tests.wrap_with import wrap_with


def trained(model: nn.Module, inputs: dict[str, Tensor], steps: int = 3) -> Engine:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(steps):
        model(**inputs).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return engine_of(model)


def test_a_move_is_given_once_when_it_has_ended(tiny: Any) -> None:
    engine = engine_of(fluxtrain.wrap(tiny("llama")))

    class Copy:
        duration_s: float | None = None

        def done(self) -> bool:
            return self.duration_s is not None

        def failed(self) -> bool:
            return False

    slow, quick = Copy(), Copy()
    quick.duration_s = 0.25
    engine.counters.uploaded(engine.groups[0], "demand", cast(Transfer, slow), 8)
    engine.counters.uploaded(engine.groups[1], "prefetch", cast(Transfer, quick), 8)
    moves, started = engine.take_moves(10)
    assert [(m.cause, m.duration_s) for m in moves] == [("prefetch", 0.25)] and started == 2
    slow.duration_s = 0.5
    moves, started = engine.take_moves(10)
    assert [(m.cause, m.duration_s) for m in moves] == [("demand", 0.5)] and started == 2
    assert engine.take_moves(10) == ([], 2)


def test_traffic_of_a_step_is_the_weights_in_and_the_gradients_out(tiny: Any, batch: Any) -> None:
    """Blocks come in twice a step (less those that still lie in a slot), gradients leave once,
    whatever the number of chunks."""
    for chunk_rows in (4, 1):
        model = fluxtrain.wrap(tiny("llama", torch.bfloat16, num_hidden_layers=8))
        engine = engine_of(model)
        engine.chunk_rows = chunk_rows
        trained(model, batch(), steps=2)
        before = engine.traffic()
        trained(model, batch(), steps=1)
        after = engine.traffic()
        blocks = [b for b in engine.groups if b.kind == "block"]
        one, every = blocks[0].weight_bytes, sum(b.weight_bytes for b in engine.groups)
        h2d, d2h = after.h2d_bytes - before.h2d_bytes, after.d2h_bytes - before.d2h_bytes
        slots = engine.plan.slots
        assert d2h == every
        edges = every - len(blocks) * one
        assert (2 * len(blocks) - slots - 1) * one <= h2d <= 2 * len(blocks) * one + edges + one


def test_device_bytes_do_not_grow_with_depth_or_steps(tiny: Any, batch: Any) -> None:
    """Weights on the device are the slots and the edges, however deep the model is."""
    held = []
    for depth in (4, 12):
        model = fluxtrain.wrap(tiny("llama", num_hidden_layers=depth), offload="max", chunk_rows=2)
        engine = trained(model, batch(), steps=3)
        once = engine.memory().device_by
        trained(model, batch(), steps=2)
        assert engine.memory().device_by == once
        assert once["activations"] == 0  # nothing is held between steps
        assert sum(once.values()) <= engine.memory().device_peak_bytes
        held.append((once["weights"], once["gradients"]))
    assert held[0] == held[1]


def test_residency_has_one_letter_a_block_and_the_real_bytes(tiny: Any, batch: Any) -> None:
    model = wrap_with(tiny("llama", torch.bfloat16), offload="weights", resident_blocks=1)
    engine = engine_of(model)
    assert engine.residency().optimizer == "..." and engine.residency().gradients == "..."
    model(**batch()).loss.backward()
    engine.clip_grad_norm(None).value()
    found = engine.residency()
    assert set(found.gradients) <= {"C", "<"} and len(found.weights) == 3
    assert [(run.name, run.first, run.count) for run in found.blocks] == [("model.layers.{}", 0, 3)]
    count = sum(p.numel() for p in model.parameters())
    assert found.weights_bytes == pytest.approx(2 * count, rel=0.05)
    torch.optim.AdamW(model.parameters()).step()
    found = engine.residency()
    assert found.optimizer == "CCC"
    assert found.optimizer_bytes == pytest.approx(10 * count, rel=0.05)
    assert engine.parameter_counts[0] == count


def test_hooks_on_blocks_and_on_what_is_inside_keep_working(tiny: Any, batch: Any) -> None:
    model = tiny("llama")
    seen: list[str] = []
    model.model.layers[0].register_forward_hook(lambda *_: seen.append("before wrap"))
    fluxtrain.wrap(model)
    model.model.layers[1].register_forward_hook(lambda *_: seen.append("after wrap"))
    model.model.layers[2].register_full_backward_hook(lambda *_: seen.append("backward"))
    model(**batch()).loss.backward()
    assert seen == ["before wrap", "after wrap", "backward"]


def test_once_the_order_is_known_no_copy_is_on_demand() -> None:
    """Also where the backward pass turns around: the blocks still there are the next ones."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=6,
        num_attention_heads=2, num_key_value_heads=2, tie_word_embeddings=True,
    )  # fmt: skip
    model = fluxtrain.wrap(LlamaForCausalLM(config), device="cpu", offload="weights", overlap=True)
    engine = engine_of(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    ids = torch.arange(32).reshape(2, 16)
    for _ in range(3):
        engine.cards[0].window.drain()
        engine.take_moves(1000)
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    engine.cards[0].window.drain()  # only copies that have ended are given
    moves, _ = engine.take_moves(1000)
    weights = [move for move in moves if move.what == "weights"]
    assert len(weights) >= 10
    assert {move.cause for move in weights} == {"prefetch"}
