"""Packed documents do not see each other: shown on logits, bit for bit, for several families."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    FalconConfig,
    FalconMambaConfig,
    FalconMambaForCausalLM,
    Lfm2Config,
    Lfm2ForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    MixtralConfig,
    OPTConfig,
    PreTrainedModel,
)

from fluxtrain.data.batches import Batch, in_order
from fluxtrain.data.packing import PackedRows
from fluxtrain.data.splitting import Spans
from fluxtrain.data.store.tokens import Tokens
from fluxtrain.models.isolation import keeps_documents_apart

LENGTHS = (9, 4, 3)  # best fit packs two of each into two full rows of 16
FAMILIES = ("llama", "qwen2", "qwen3", "gpt2")


def _batch(seed: int, long_document_seed: int) -> Batch:
    """Two rows of three documents; the longest document of each row has a seed of its own."""
    ids = np.random.default_rng(seed).integers(1, 300, 2 * 16).astype(np.uint32)
    for row in range(2):
        own = np.random.default_rng(long_document_seed + row)
        ids[16 * row : 16 * row + 9] = own.integers(1, 300, 9)
    starts = np.cumsum([0, *LENGTHS, *LENGTHS]).astype(np.int64)
    rows = PackedRows(Tokens(ids, starts), Spans(starts[:-1], np.diff(starts)), 16)
    (batch,) = in_order(rows, 2)
    return batch


def _logits(model: PreTrainedModel, batch: Batch) -> Tensor:
    with torch.no_grad():
        return model(**batch.inputs()).logits


def _load(folder: Path, attention: str = "sdpa") -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(folder, attn_implementation=attention).eval()


def _document(batch: Batch, number: int) -> Tensor:
    """(B, T) mask of the tokens of one document of each row."""
    return (batch.position_ids == 0).cumsum(-1) == number + 1


def _long_documents(batch: Batch) -> Tensor:
    """(B, T) mask of the longest document of each row."""
    masks = [_document(batch, number) for number in range(len(LENGTHS))]
    long = torch.stack([mask & (mask.sum(-1, keepdim=True) == max(LENGTHS)) for mask in masks])
    assert (long.any(0).sum(-1) == max(LENGTHS)).all()
    return long.any(0)


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("family", FAMILIES)
def test_other_tokens_in_one_document_change_no_bit_of_another(
    model_folder: Callable[..., Path], family: str, attention: str, training: bool
) -> None:
    model = _load(model_folder(family), attention)
    model.train(training)
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    batch, other = _batch(0, 100), _batch(0, 200)
    assert torch.equal(batch.position_ids, other.position_ids)
    once, again = _logits(model, batch), _logits(model, other)
    changed = _long_documents(batch)
    assert torch.equal(batch.input_ids[~changed], other.input_ids[~changed])
    assert not torch.equal(once[changed], again[changed])
    assert torch.equal(once[~changed], again[~changed])


@pytest.mark.parametrize("family", FAMILIES)
def test_a_packed_document_gets_the_logits_that_it_gets_alone(
    model_folder: Callable[..., Path], family: str
) -> None:
    model = _load(model_folder(family))
    batch = _batch(0, 100)
    packed = _logits(model, batch)
    for row in range(2):
        for number in range(len(LENGTHS)):
            inside = _document(batch, number)[row]
            alone = batch.input_ids[row][inside][None]
            with torch.no_grad():
                expected = model(input_ids=alone, use_cache=False).logits[0]
            torch.testing.assert_close(packed[row][inside], expected, rtol=1e-5, atol=1e-5)


def test_with_a_cache_documents_would_see_each_other_so_batches_turn_it_off(
    model_folder: Callable[..., Path],
) -> None:
    model = _load(model_folder("llama"))
    changed = _long_documents(_batch(0, 100))
    leaking = []
    for seed in (100, 200):
        inputs = _batch(0, seed).inputs()
        assert inputs["use_cache"] is False
        with torch.no_grad():
            leaking.append(model(**(inputs | {"use_cache": True})).logits)
    assert not torch.equal(leaking[0][~changed], leaking[1][~changed])


def test_the_loss_of_a_packed_row_is_the_mean_over_its_documents_alone(
    model_folder: Callable[..., Path],
) -> None:
    model = _load(model_folder("llama"))
    batch = _batch(0, 100)
    with torch.no_grad():
        packed = model(**batch.inputs()).loss
    total = torch.zeros(())
    for row in range(2):
        for number in range(len(LENGTHS)):
            alone = batch.input_ids[row][_document(batch, number)[row]][None]
            with torch.no_grad():
                logits = model(input_ids=alone, use_cache=False).logits[0, :-1]
            total += torch.nn.functional.cross_entropy(logits, alone[0, 1:], reduction="sum")
    assert batch.predicted == 2 * (16 - len(LENGTHS))
    torch.testing.assert_close(packed, total / batch.predicted)


def _recurrent(family: str) -> PreTrainedModel:
    torch.manual_seed(3)
    small: dict[str, Any] = {"vocab_size": 320, "hidden_size": 32, "num_hidden_layers": 2}
    if family == "mamba":
        return MambaForCausalLM(MambaConfig(**small, state_size=8)).eval()
    if family == "falcon_mamba":
        return FalconMambaForCausalLM(FalconMambaConfig(**small, state_size=8)).eval()
    config = Lfm2Config(
        **small, intermediate_size=64, num_attention_heads=4, num_key_value_heads=2,
        layer_types=["conv", "full_attention"],
    )  # fmt: skip
    return Lfm2ForCausalLM(config).eval()


@pytest.mark.parametrize("family", ["mamba", "falcon_mamba", "lfm2"])
def test_models_that_carry_state_across_documents_are_told_and_get_one_document_a_row(
    family: str,
) -> None:
    model = _recurrent(family)
    assert not keeps_documents_apart(model)
    tokens = Tokens(np.arange(1, 17, dtype=np.uint32), np.array([0, 7, 12, 16]))
    spans = Spans(tokens.starts[:-1], np.diff(tokens.starts))
    (batch,) = in_order(PackedRows(tokens, spans, 16, pack=False), 3)
    assert batch.input_ids.shape == (3, 16)
    assert "position_ids" not in batch.inputs()
    inputs = batch.inputs()
    padded = _logits(model, batch)
    inputs["input_ids"] = torch.where(batch.input_ids == 0, 5, batch.input_ids)  # other padding
    with torch.no_grad():
        again = model(**inputs).logits
    real = batch.input_ids != 0
    assert torch.equal(padded[real], again[real])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", FAMILIES)
def test_models_that_keep_documents_apart_are_told(
    model_folder: Callable[..., Path], family: str, dtype: torch.dtype
) -> None:
    model = _load(model_folder(family)).to(dtype).train()
    assert keeps_documents_apart(model)
    assert model.training


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", ["opt", "falcon", "mixtral"])
def test_taking_position_ids_is_not_taken_for_keeping_documents_apart(
    family: str, dtype: torch.dtype
) -> None:
    torch.manual_seed(3)
    small: dict[str, Any] = {"vocab_size": 320, "hidden_size": 32, "num_hidden_layers": 2}
    small |= {"num_attention_heads": 4}
    if family == "opt":
        config: Any = OPTConfig(**small, ffn_dim=64, word_embed_proj_dim=32)
    elif family == "falcon":
        config = FalconConfig(**small, alibi=False)
    else:
        config = MixtralConfig(**small, num_key_value_heads=2, intermediate_size=32)
    model = AutoModelForCausalLM.from_config(config).to(dtype)
    assert keeps_documents_apart(model) == (family == "mixtral")
