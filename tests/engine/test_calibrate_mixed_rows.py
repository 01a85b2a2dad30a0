"""Rows of several documents take more memory, and the plan knows before the first of them comes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import Qwen2Config, Qwen2ForCausalLM
from transformers.models.qwen2.modeling_qwen2 import Qwen2DecoderLayer

from fluxtrain.data.batches import Batch
from fluxtrain.machine.machine import read_machine
from fluxtrain.measure.calibrate import calibrate
from fluxtrain.measure.measured_constants import known_constants, measure_constants
from fluxtrain.methods.objective import BoundBatch
from fluxtrain.methods.text_task import CausalLM
from fluxtrain.train.placing.placing import model_facts

LENGTH = 16
HELD_BYTES = 8 << 20  # a row: what attention with a mask keeps here until the backward pass
CPU = torch.device("cpu")


class Hold(torch.autograd.Function):
    """The identity, which keeps memory for its backward pass."""

    @staticmethod
    def forward(context: Any, hidden: Tensor) -> Tensor:
        context.save_for_backward(torch.ones(hidden.shape[0], HELD_BYTES, dtype=torch.uint8))
        return hidden.clone()

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> Tensor:
        assert context.saved_tensors
        return gradients[0]


@pytest.fixture(autouse=True)
def masks_cost_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    forward = Qwen2DecoderLayer.forward

    def held(self: Any, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        masked = kwargs.get("attention_mask") is not None
        return forward(
            self, Hold.apply(hidden_states) if masked else hidden_states, *args, **kwargs
        )

    monkeypatch.setattr(Qwen2DecoderLayer, "forward", held)


def model() -> Qwen2ForCausalLM:
    config = Qwen2Config(
        hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, vocab_size=64, tie_word_embeddings=True,
    )  # fmt: skip
    torch.manual_seed(0)
    return Qwen2ForCausalLM(config).train()


def rows_of(rows: int, documents: int = 1) -> BoundBatch[Batch]:
    ids = torch.randint(0, 60, (rows, LENGTH), generator=torch.Generator().manual_seed(0))
    positions = torch.arange(LENGTH // documents).repeat(documents).expand(rows, LENGTH)
    count = rows * (LENGTH - documents)
    return BoundBatch(CausalLM(), Batch(
        input_ids=ids, labels=ids, position_ids=positions, predicted=count, tokens=ids.numel(),
    ))  # fmt: skip


def mixed_of(rows: int) -> BoundBatch[Batch]:
    return rows_of(rows, documents=4)


def _never(rows: int) -> BoundBatch[Batch]:
    raise AssertionError(f"{rows} rows were asked for")


def test_what_rows_of_several_documents_hold_counts() -> None:
    one = calibrate(model(), rows_of, CPU, (1, 4))
    assert one.activation_bytes < HELD_BYTES / 2
    both = calibrate(model(), rows_of, CPU, (1, 4), heavier_of=mixed_of)
    assert 0.9 * HELD_BYTES < both.activation_bytes < 1.5 * HELD_BYTES


def test_where_no_rows_are_heavier_no_others_are_timed() -> None:
    asked: list[int] = []
    calibrate(model(), mixed_of, CPU, (2, 4), heavier_of=asked.append)
    assert asked == [2, 4]


def test_what_was_timed_with_rows_of_one_document_does_not_serve_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fluxtrain.measure.calibrate.others_share", lambda _: None)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    machine, made = read_machine(), model()
    facts = model_facts(made, made.config, LENGTH)
    plain = measure_constants(facts, machine, "cpu", 4, made, rows_of)
    assert not measure_constants(facts, machine, "cpu", 4, made, _never).is_new
    assert measure_constants(facts, machine, "cpu", 4, made, rows_of, mixed_of).is_new
    assert not measure_constants(facts, machine, "cpu", 4, made, _never, _never).is_new
    found = known_constants(facts, machine, "cpu", 4)  # without the data: the heavier ones
    assert plain.calibration is not None
    assert found.calibration is not None
    assert found.calibration.measured_at_s > plain.calibration.measured_at_s
