"""Changes between two steps on a real GPU: bits stay, memory comes back, no room is undone."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from fluxtrain.core.wrap.engine import Engine, engine_of
from fluxtrain.core.wrap.grouping import facts_of
from fluxtrain.errors import DoesNotFit
from fluxtrain.plan.facts import RowFacts
from fluxtrain.plan.footprint import Layout, footprint
from fluxtrain.train.live.apply_placement import apply_placement
from fluxtrain.train.live.live_run import LiveRun
from fluxtrain.train.live.settings import LiveSettings
from fluxtrain.units import MIB
from tests.live_settings import settings_with
from tests.placements import placement_of
from tests.wrap_with import wrap_with

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]

LAYERS = 6


@pytest.fixture(autouse=True)
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)
    torch.cuda.set_per_process_memory_fraction(1.0)


class Training:
    """Blocks of 25 MiB in bf16, streamed through three slots."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        model: nn.Module = LlamaForCausalLM(
            LlamaConfig(
                hidden_size=1024,
                intermediate_size=2816,
                num_hidden_layers=LAYERS,
                num_attention_heads=8,
                num_key_value_heads=8,
                vocab_size=1024,
                max_position_embeddings=256,
            )
        ).to(torch.bfloat16)
        row = RowFacts(
            hidden=1024, vocabulary=1024, sequence_length=64, dtype_bytes=2,
            activation_bytes=4 * MIB,
        )  # fmt: skip
        layout = Layout(offload="weights", batch_rows=8, chunk_rows=2)
        facts = replace(facts_of(model), row=row)
        placement = placement_of(facts, layout, footprint(facts, layout, has_gpu=True))
        self.context = LiveRun(facts, placement, has_gpu=True)
        self.model = wrap_with(
            model.train(), device="cuda", offload="weights", chunk_rows=2, overlap=True,
            device_groups=0, resident_blocks=0,
        )  # fmt: skip
        self.engine: Engine = engine_of(self.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.losses: list[float] = []

    def steps(self, count: int) -> list[float]:
        for _ in range(count):
            torch.manual_seed(len(self.losses))
            ids = torch.randint(0, 1024, (8, 64))
            loss = self.model(input_ids=ids, labels=ids).loss
            loss.backward()
            self.engine.clip_grad_norm(0.3)
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.losses.append(float(loss.detach()))
        return self.losses

    def turn(self, settings: LiveSettings) -> None:
        apply_placement(self.engine, self.context.placement_with(settings))

    def weights_bytes(self) -> int:
        return self.engine.memory().device_by["weights"]


def test_losses_keep_their_bits_through_changes_of_residency_and_prefetch() -> None:
    plain, turned = Training(), Training()
    plain.steps(10)
    for prefetch, resident in ((2, 3), (4, 0), (1, 4), (2, LAYERS), (2, 0)):
        turned.steps(2)
        turned.turn(settings_with(turned.context, prefetch=prefetch, resident_blocks=resident))
    assert turned.losses == plain.losses
    assert turned.steps(2) == plain.steps(2)


def test_whole_parts_move_to_the_gpu_and_back_with_the_same_bits() -> None:
    plain, turned = Training(), Training()
    plain.steps(10)
    for device_groups in (3, LAYERS + 3, 1, 0):
        turned.steps(2)
        settings = settings_with(
            turned.context, prefetch=2, resident_blocks=0, device_groups=device_groups
        )
        turned.turn(settings)
        need = turned.context.need(settings)
        used = turned.engine.memory().device_by
        assert (used["weights"], used["optimizer"]) == (need.weights_bytes, need.optimizer_bytes)
    assert turned.steps(2) == plain.losses
    for a, b in zip(turned.model.parameters(), plain.model.parameters(), strict=True):
        assert torch.equal(a.detach().cpu(), b.detach().cpu())


def test_memory_is_what_the_layout_says_and_comes_back() -> None:
    run = Training()
    run.steps(2)
    torch.cuda.synchronize()
    before, allocated = run.weights_bytes(), torch.cuda.memory_allocated()
    assert before == run.context.need(run.context.planned).weights_bytes
    more = settings_with(run.context, prefetch=2, resident_blocks=3)
    run.turn(more)
    run.steps(1)
    grown = run.context.device_bytes(more, 0) - run.context.device_bytes(run.context.planned, 0)
    assert run.weights_bytes() - before == grown
    peak = run.engine.memory().device_peak_bytes
    run.turn(run.context.planned)
    run.steps(2)
    torch.cuda.synchronize()
    assert run.weights_bytes() == before
    assert torch.cuda.memory_allocated() == pytest.approx(allocated, abs=2 * MIB)
    assert run.engine.memory().device_peak_bytes >= peak  # the run's peak is not forgotten


def _what_is_left() -> list[torch.Tensor]:
    """All memory below the limit, so that nothing is found between other tensors."""
    filling: list[torch.Tensor] = []
    for size in (32 * MIB, 8 * MIB, 2 * MIB, MIB // 2):  # the allocator keeps large and small apart
        with suppress(torch.OutOfMemoryError):
            while True:
                filling.append(torch.empty(size, dtype=torch.uint8, device="cuda"))
    return filling


def test_a_change_that_runs_out_of_device_memory_is_undone() -> None:
    plain, run = Training(), Training()
    plain.steps(4)
    run.steps(2)
    before, plan = run.weights_bytes(), run.engine.plan
    gc.collect()  # what other tests left must not be freed below the limit
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(torch.cuda.memory_reserved() / total)
    filling = _what_is_left()
    with pytest.raises(DoesNotFit):
        run.turn(settings_with(run.context, prefetch=2, resident_blocks=LAYERS))
    torch.cuda.set_per_process_memory_fraction(1.0)
    del filling
    assert (run.weights_bytes(), run.engine.plan) == (before, plan)
    assert run.steps(2) == plain.losses
