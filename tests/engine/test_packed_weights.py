"""Frozen weights packed in 4 and 8 bits: a model with them trains like one that holds what they
unpack to, bit for bit, wherever its blocks are."""

from __future__ import annotations

import io
from collections.abc import Iterator
from typing import Any, cast, get_args

import pytest
import torch
from peft import (
    LoraConfig,
    get_peft_model,
    get_peft_model_state_dict,
    prepare_model_for_kbit_training,
)
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

import fluxtrain
from fluxtrain.core.wrap.engine import engine_of
from fluxtrain.errors import BadInput, MisusedModel
from fluxtrain.plan import states
from fluxtrain.plan.states import PACKED_FORMATS, PackedFormat
from tests.packed_models import BASE, LAYOUTS, LEAST, adapted, llama, trained, with_unpacked


@pytest.fixture(autouse=True, scope="module")
def small_weights_are_packed() -> Iterator[None]:
    """Tests have small models."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(states, "LEAST_PACKED", LEAST)
        yield


@pytest.fixture(scope="module")
def expected(small_weights_are_packed: None) -> dict[str, list[float]]:
    """The losses of a resident model that holds the unpacked weights."""
    found: dict[str, list[float]] = {}
    for storage in PACKED_FORMATS:
        model = llama()
        with_unpacked(model, storage)
        wrapped = fluxtrain.wrap(adapted(model), device="cpu", offload="none", chunk_rows=2)
        found[storage] = trained(wrapped)
    return found


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda given: "-".join(map(str, given.values())))
@pytest.mark.parametrize("storage", PACKED_FORMATS)
@pytest.mark.thinned(4)
def test_a_packed_base_trains_like_the_weights_it_unpacks_to(
    storage: PackedFormat, layout: dict[str, Any], expected: dict[str, list[float]]
) -> None:
    model = fluxtrain.wrap(adapted(llama()), device="cpu", chunk_rows=2, frozen=storage, **layout)
    assert trained(model) == expected[storage]


def test_formats_differ_from_each_other_and_from_the_plain_base(
    expected: dict[str, list[float]],
) -> None:
    plain = trained(fluxtrain.wrap(adapted(llama()), device="cpu", chunk_rows=2))
    assert len({tuple(losses) for losses in (plain, *expected.values())}) == 4


@pytest.mark.parametrize(
    "settings",
    [{"use_rslora": True}, {"lora_dropout": 0.2}, {"use_dora": True}],
    ids=["rslora", "dropout", "dora"],
)
def test_variants_of_lora_run_on_a_packed_base(settings: dict[str, Any]) -> None:
    model = llama()
    with_unpacked(model, "nf4")
    resident = adapted(model, **settings)
    losses = trained(fluxtrain.wrap(resident, device="cpu", offload="none", chunk_rows=4))
    model = llama()
    with_unpacked(model, "nf4")  # so that DoRA's magnitudes are of the same weights
    packed = fluxtrain.wrap(
        adapted(model, **settings), device="cpu", offload="weights", chunk_rows=4, frozen="nf4"
    )
    assert trained(packed) == losses


def test_magnitudes_of_a_fresh_dora_are_those_of_the_packed_weights() -> None:
    model = llama()
    with_unpacked(model, "nf4-double")
    resident = fresh_dora(model)
    packed = fresh_dora(llama())
    before = dict(packed.named_parameters())
    name = next(n for n in before if "magnitude" in n)
    original = before[name].detach().clone()
    fluxtrain.wrap(resident, device="cpu", offload="none", chunk_rows=4)
    fluxtrain.wrap(packed, device="cpu", offload="weights", chunk_rows=4, frozen="nf4-double")
    assert not torch.equal(original, before[name].detach())
    assert trained(packed) == trained(resident)


def test_magnitudes_of_a_trained_dora_stay() -> None:
    packed = adapted(llama(), use_dora=True)  # whose second matrices are not zero
    name, before = next((n, p) for n, p in packed.named_parameters() if "magnitude" in n)
    before = before.detach().clone()
    fluxtrain.wrap(packed, device="cpu", frozen="nf4")
    assert torch.equal(before, dict(packed.named_parameters())[name].detach())


def fresh_dora(model: nn.Module) -> Any:
    torch.manual_seed(3)
    config = LoraConfig(r=8, target_modules="all-linear", use_dora=True, task_type="CAUSAL_LM")
    return get_peft_model(cast(Any, model), config, autocast_adapter_dtype=False).train()


def test_a_resident_block_uploads_its_trained_bytes_alone() -> None:
    for storage in get_args(states.StorageFormat):
        model = fluxtrain.wrap(adapted(llama()), device="cpu", offload="optimizer", frozen=storage)
        engine = engine_of(model)
        trained(model, steps=2)
        before = engine.traffic().h2d_bytes
        trained(model, steps=1)
        adapters = sum(group.trained_bytes for group in engine.groups if group.kind == "block")
        assert 0 < engine.traffic().h2d_bytes - before <= adapters


def test_no_byte_of_the_base_is_written() -> None:
    model = fluxtrain.wrap(adapted(llama()), device="cpu", offload="weights", frozen="nf4-double")
    engine = engine_of(model)

    def base() -> list[bytes]:
        return [
            group.memory.flat_weights[group.trained_bytes :].numpy().tobytes()
            for group in engine.groups
            if group.memory.flat_weights is not None
        ]

    before = base()
    trained(model)
    assert base() == before


def test_a_packed_weight_has_shape_and_dtype_and_no_values() -> None:
    model = fluxtrain.wrap(adapted(llama()), device="cpu", frozen="nf4")
    weight = next(p for n, p in model.named_parameters() if "down_proj.base_layer" in n)
    assert (tuple(weight.shape), weight.dtype) == ((64, 96), torch.bfloat16)
    assert weight.numel() == 64 * 96
    for read in (
        lambda: weight + 1,
        lambda: weight.sum() + 1,
        lambda: weight.detach().clone(),
        lambda: weight.data.float() + 1,
        lambda: weight.cpu().tolist(),
        lambda: weight.T,
        lambda: torch.save(model.state_dict(), io.BytesIO()),
    ):
        with pytest.raises(MisusedModel, match="packed"):
            read()


def test_adapters_are_saved_from_a_packed_model_without_its_base() -> None:
    model = fluxtrain.wrap(adapted(llama()), device="cpu", frozen="nf4")
    trained(model)
    saved = get_peft_model_state_dict(cast(Any, model))
    assert saved and all("lora_" in name for name in saved)
    assert all(torch.isfinite(tensor).all() for tensor in saved.values())


def test_unwrap_gives_the_unpacked_weights_back() -> None:
    plain, packed = llama(), llama()
    with_unpacked(plain, "nf4-double")
    model = fluxtrain.wrap(adapted(packed), device="cpu", frozen="nf4-double")
    fluxtrain.unwrap(model)
    after = dict(model.named_parameters())
    for name, parameter in plain.named_parameters():
        if BASE in name and parameter.numel() >= LEAST:
            there = after[f"base_model.model.{name}".replace(".weight", ".base_layer.weight")]
            assert type(there) is nn.Parameter
            assert torch.equal(there, parameter)


def test_streamed_adapters_follow_the_losses_of_plain_peft() -> None:
    plain = adapted(llama().float())
    wrapped = fluxtrain.wrap(adapted(llama().float()), device="cpu", offload="weights")
    assert trained(wrapped, steps=4) == pytest.approx(trained(plain, steps=4), abs=1e-4)


def test_a_base_that_was_cast_to_fp32_is_told(caplog: pytest.LogCaptureFixture) -> None:
    config = LlamaConfig(
        hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=128,
    )  # fmt: skip
    model = LlamaForCausalLM(config).bfloat16()
    fluxtrain.wrap(adapted(prepare_model_for_kbit_training(model)), device="cpu")
    assert "frozen weights of blocks are float32" in caplog.text
    caplog.clear()
    fluxtrain.wrap(adapted(LlamaForCausalLM(config).bfloat16()), device="cpu")
    fluxtrain.wrap(LlamaForCausalLM(config), device="cpu")
    assert "float32" not in caplog.text


def test_an_unknown_format_is_refused_with_the_known_ones() -> None:
    with pytest.raises(BadInput, match="frozen is 'fp4'.*nf4-double"):
        fluxtrain.wrap(llama(), device="cpu", frozen=cast(Any, "fp4"))


def test_trained_weights_are_never_packed() -> None:
    model = fluxtrain.wrap(llama(), device="cpu", frozen="nf4")
    assert all(segment.packed is None for g in engine_of(model).groups for segment in g.segments)
