"""What the plan predicts is what a wrapped model holds: facts, arenas, and the device's peak."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, Qwen2Config, Qwen2ForCausalLM

import fluxtrain
from fluxtrain.core.wrap.engine import Engine, engine_of
from fluxtrain.core.wrap.grouping import facts_of
from fluxtrain.plan import heads
from fluxtrain.plan.choose import place
from fluxtrain.plan.facts import Capacity, RowFacts, activation_estimate
from fluxtrain.plan.placement import Placement
from fluxtrain.plan.request import RunRequest

ROWS, LENGTH = 4, 10
Tiny = Callable[..., PreTrainedModel]
Batch = Callable[..., dict[str, Tensor]]

LAYOUTS = [
    RunRequest(offload="weights"),
    RunRequest(offload="weights", resident_blocks=2),
    RunRequest(offload="weights", resident_blocks=2, blocks_without_recompute=2),
    RunRequest(offload="weights", device_groups=2),
    RunRequest(offload="weights", device_groups=1, resident_blocks=1),
    RunRequest(offload="weights", device_groups=99),
    RunRequest(offload="weights", embedding="rows"),
    RunRequest(offload="weights", embedding="rows", device_groups=1),
    RunRequest(offload="max", embedding="rows"),
    RunRequest(offload="optimizer"),
    RunRequest(offload="max"),
    RunRequest(offload="none"),
    RunRequest(offload="none", blocks_without_recompute=1),
]


def planned(model: Any, request: RunRequest) -> Placement:
    """The plan of a run without a GPU for the rows of these tests."""
    config = model.config
    dtype_bytes = next(model.parameters()).element_size()
    row = RowFacts(
        hidden=config.hidden_size,
        vocabulary=config.vocab_size,
        sequence_length=LENGTH,
        dtype_bytes=dtype_bytes,
        activation_bytes=activation_estimate(
            config.hidden_size, config.intermediate_size, LENGTH, dtype_bytes
        ),
    )
    request = replace(request, batch_rows=ROWS, chunk_rows=2)
    room = Capacity(device_free_bytes=None, host_available_bytes=None)
    return place(replace(facts_of(model), row=row), room, request)


def trained(model: nn.Module, plan: Placement, batch: dict[str, Tensor], steps: int) -> Engine:
    """The engine of the model, wrapped as planned, after `steps` optimizer steps."""
    fluxtrain.wrap(model, device="cpu", placement=plan)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    for _ in range(steps):
        model(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return engine_of(model)


@pytest.mark.parametrize("asked", LAYOUTS, ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("family", ["llama", "qwen2"])
@pytest.mark.thinned(10)
def test_the_predicted_bytes_are_those_that_training_holds(
    tiny: Tiny, batch: Batch, family: str, dtype: torch.dtype, asked: RunRequest
) -> None:
    """Host: exact. Device: all but the workspace (recomputed activations, logits, the head's fp32
    gradient sum, gradients on their way to the sums) and kept activations, which are torch's own
    and which nobody counts without a GPU."""
    model = tiny(family, dtype)
    plan = planned(model, asked)
    engine = trained(model, plan, batch(family, ROWS, LENGTH), steps=3)
    memory = engine.memory()
    assert memory.host_arena_bytes == plan.need.arena_bytes
    assert plan.host_bytes >= plan.need.arena_bytes + plan.device_bytes  # one memory has both
    counted = plan.need.shown_device_bytes(has_gpu=False)
    if asked.offload == "max":  # two boundaries at a time on the device, held by nobody for long
        counted -= plan.need.block_inputs_bytes
    assert memory.device_peak_bytes == pytest.approx(counted, rel=0.1)
    assert engine.plan is plan
    assert plan.slots == len([s for s in engine.cards[0].window.slots if not s.owner])


def test_several_backward_passes_a_step_are_in_the_plan(tiny: Tiny, batch: Batch) -> None:
    model = tiny("qwen2", torch.bfloat16)
    once = planned(model, RunRequest(offload="weights", device_groups=2))
    plan = planned(model, RunRequest(offload="weights", device_groups=2, passes=2))
    engine = trained(model, plan, batch("qwen2", ROWS, LENGTH), steps=1)
    model(**batch("qwen2", ROWS, LENGTH)).loss.backward()
    model(**batch("qwen2", ROWS, LENGTH)).loss.backward()
    assert engine.memory().host_arena_bytes == plan.need.arena_bytes > once.need.arena_bytes
    gradients = engine.memory().device_by["gradients"]
    assert gradients == pytest.approx(plan.need.gradients_bytes, rel=0.1)


def test_rows_of_several_backward_passes_are_planned_and_counted() -> None:
    torch.manual_seed(0)
    config = Qwen2Config(
        hidden_size=64, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, vocab_size=2000,
        tie_word_embeddings=False,
    )  # fmt: skip
    model = Qwen2ForCausalLM(config).to(torch.bfloat16).train()
    passes = 3
    plan = planned(model, RunRequest(offload="weights", embedding="rows", passes=passes))
    engine = trained(model, plan, {"input_ids": torch.ones(1, 1, dtype=torch.long)}, steps=0)
    ids = torch.randperm(2000)[: passes * ROWS * LENGTH].view(passes, ROWS, LENGTH)
    for part in ids[:-1]:  # as many rows as there can be
        model(input_ids=part, labels=part).loss.backward()
    gradients = engine.memory().device_by["gradients"]
    assert gradients == pytest.approx(plan.need.gradients_bytes, rel=0.02)
    model(input_ids=ids[-1], labels=ids[-1]).loss.backward()
    engine.clip_grad_norm(1.0)
    memory = engine.memory()
    states = plan.need.arena_bytes - memory.host_arena_bytes  # are made by the first update
    assert states == sum(g.state_bytes for g in facts_of(model).groups)
    assert memory.device_peak_bytes == pytest.approx(
        plan.need.shown_device_bytes(has_gpu=False), rel=0.02
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_rows_that_a_tied_head_in_slices_keeps_are_planned_and_counted(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(heads, "VOCAB_CHUNK_BYTES", 1)
    monkeypatch.setattr(heads, "MULTIPLE_ROWS", 100)
    torch.manual_seed(0)
    config = Qwen2Config(
        hidden_size=256, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, vocab_size=600, tie_word_embeddings=True,
    )  # fmt: skip
    model = Qwen2ForCausalLM(config).to(dtype).train()
    plan = planned(model, RunRequest(offload="weights", embedding="rows", head="chunks"))
    assert plan.layout.head == "chunks"
    ids = torch.randperm(600)[: ROWS * LENGTH].view(ROWS, LENGTH)  # as many rows as there can be
    memory = trained(model, plan, {"input_ids": ids, "labels": ids}, steps=3).memory()
    assert memory.device_peak_bytes == plan.need.shown_device_bytes(has_gpu=False)


def adapted(model: PreTrainedModel, dtype: torch.dtype) -> nn.Module:
    """The model frozen, with adapters of `dtype` to train."""
    peft = pytest.importorskip("peft")
    wanted = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"])
    made: nn.Module = peft.get_peft_model(model, wanted)
    for parameter in made.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.to(dtype)
    return made


@pytest.mark.parametrize("adapters", [torch.bfloat16, torch.float32], ids=str)
def test_frozen_weights_beside_trained_adapters_are_counted_to_the_byte(
    tiny: Tiny, batch: Batch, adapters: torch.dtype
) -> None:
    model = adapted(tiny("llama", torch.bfloat16), adapters)
    facts = facts_of(model)
    assert facts.head_parameters == 0  # frozen: no gradient is summed for it
    assert [bool(g.state_bytes) for g in facts.groups] == [False, True, True, True, False, False]
    plan = planned(model, RunRequest(offload="weights", device_groups=2))
    engine = trained(model, plan, batch("llama", ROWS, LENGTH), steps=3)
    assert engine.memory().host_arena_bytes == plan.need.arena_bytes
    counted = plan.device_bytes - plan.need.workspace_bytes
    assert engine.memory().device_peak_bytes == pytest.approx(counted, rel=0.1)


def test_the_facts_of_an_empty_model_are_those_of_the_real_one(family: str, tiny: Tiny) -> None:
    real = tiny(family, torch.bfloat16)
    with torch.device("meta"):
        empty = type(real)(real.config).to(torch.bfloat16)
    empty.tie_weights()
    assert facts_of(empty) == facts_of(real)


def test_the_facts_know_what_is_shared_and_what_is_the_head(tiny: Tiny) -> None:
    tied, untied = facts_of(tiny("qwen2")), facts_of(tiny("llama"))
    assert [g.users for g in tied.groups] == [2, 1, 1, 1, 1]
    assert [g.kind for g in untied.groups] == ["edge", "block", "block", "block", "edge", "edge"]
    assert all(g.users == 1 for g in untied.groups)
    assert tied.head_parameters == untied.head_parameters == 96 * 32
    assert (tied.head_dtype_bytes, facts_of(tiny("qwen2", torch.bfloat16)).head_dtype_bytes) == (
        4,
        2,
    )
    shared = [g for g in facts_of(tiny("t5")).groups if g.users > 1]
    assert len(shared) == 1
    assert shared[0].users >= 3  # the embedding of encoder, decoder and head


def test_a_blocks_activations_are_about_what_autograd_keeps(tiny: Tiny) -> None:
    """What is saved for the backward pass, measured, is most of the estimate; the rest of it is
    gradients that exist at the same time."""
    sizes = {"hidden_size": 64, "intermediate_size": 256, "num_hidden_layers": 2}
    length, kept = 64, dict[int, int]()
    model = tiny("qwen2", torch.bfloat16, max_position_embeddings=length, **sizes)
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}

    def count(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    held: list[object] = []
    layer = model.model.layers[1]
    original = layer.forward

    def measured(*args: object, **kwargs: object) -> object:
        with torch.autograd.graph.saved_tensors_hooks(count, lambda t: t):
            held.append(original(*args, **kwargs))
        return held[0]

    layer.forward = measured
    model(input_ids=torch.arange(length).unsqueeze(0) % 96)
    estimate = activation_estimate(64, 256, length, 2)
    assert 0.5 * estimate <= sum(kept.values()) <= estimate, sum(kept.values()) / estimate
