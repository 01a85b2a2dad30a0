"""Models that bitsandbytes has quantised are taken over with its codes, and given back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

import fluxtrain
from fluxtrain.core.wrap.engine import engine_of
from fluxtrain.errors import UnsupportedModel

bnb = pytest.importorskip("bitsandbytes")
Quantise = Callable[[nn.Linear], nn.Module]


def llama() -> LlamaForCausalLM:
    config = LlamaConfig(
        hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=128, use_cache=False,
    )  # fmt: skip
    torch.manual_seed(1)
    return LlamaForCausalLM(config).bfloat16()


def in_4_bits(linear: nn.Linear, *, double: bool = False, kind: str = "nf4") -> nn.Module:
    made = bnb.nn.Linear4bit(
        linear.in_features, linear.out_features, bias=False, compute_dtype=torch.bfloat16,
        quant_type=kind,
    )  # fmt: skip
    weight = bnb.nn.Params4bit(
        linear.weight.data.clone(), requires_grad=False, quant_type=kind, compress_statistics=double
    )
    made.weight = weight.to("cpu")
    return made


def in_8_bits(linear: nn.Linear) -> nn.Module:
    made = bnb.nn.Linear8bitLt(
        linear.in_features, linear.out_features, bias=False, has_fp16_weights=False
    )
    weight = bnb.nn.Int8Params(
        linear.weight.data.clone(), requires_grad=False, has_fp16_weights=False
    )
    made.weight = weight.to("cpu")
    return made


KINDS: dict[str, Quantise] = {
    "nf4": in_4_bits,
    "nf4-double": lambda linear: in_4_bits(linear, double=True),
    "int8": in_8_bits,
}


def quantised(model: LlamaForCausalLM, quantise: Quantise) -> LlamaForCausalLM:
    for parent in list(model.model.layers.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, nn.Linear):
                setattr(parent, name, quantise(child))
    return model


def dense(layer: Any) -> torch.Tensor:
    """The weight that a layer of bitsandbytes stands for, by the documented arithmetic."""
    if isinstance(layer, bnb.nn.Linear8bitLt):
        return (
            layer.weight.CB.float() * layer.weight.SCB[:, None] * 7.874015718698502e-3
        ).bfloat16()
    state = layer.weight.quant_state
    absmax = state.absmax
    if state.nested:
        second = state.state2
        absmax = second.code[absmax.int()] * second.absmax.repeat_interleave(256)[: len(absmax)]
        absmax = absmax + state.offset
    pairs = layer.weight.data.view(-1)
    codes = torch.stack((pairs >> 4, pairs & 15), dim=1).view(-1)[: state.shape.numel()]
    values = state.code[codes.int()] * absmax.repeat_interleave(64)[: len(codes)]
    return values.view(state.shape).bfloat16()


def dequantised(model: LlamaForCausalLM, quantise: Quantise) -> LlamaForCausalLM:
    for parent in list(model.model.layers.modules()):
        for child in parent.children():
            if isinstance(child, nn.Linear):
                child.weight.data = dense(quantise(child))
    return model


def adapted(model: nn.Module) -> Any:
    torch.manual_seed(2)
    names = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    config = LoraConfig(r=4, target_modules=names, task_type="CAUSAL_LM")
    made: Any = get_peft_model(model, config, autocast_adapter_dtype=False)  # type: ignore[arg-type]
    torch.manual_seed(3)
    for name, parameter in made.named_parameters():
        if "lora_" in name:  # peft draws them in another order beside other layers
            parameter.data = 0.02 * torch.randn(parameter.shape).bfloat16()
    return made.train()


def trained(model: nn.Module) -> list[float]:
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=1e-3)
    random = torch.Generator().manual_seed(5)
    losses = []
    for _ in range(3):
        ids = torch.randint(0, 128, (4, 24), generator=random)
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("offload", ["none", "weights"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.thinned(3)
def test_a_quantised_model_trains_like_the_weights_it_stands_for(kind: str, offload: str) -> None:
    resident = adapted(dequantised(llama(), KINDS[kind]))
    expected = trained(fluxtrain.wrap(resident, device="cpu", offload="none", chunk_rows=2))
    model = adapted(quantised(llama(), KINDS[kind]))
    fluxtrain.wrap(model, device="cpu", offload=offload, chunk_rows=2)
    blocks = [group for group in engine_of(model).groups if group.kind == "block"]
    assert {s.storage for g in blocks for s in g.packed_segments} == {kind}
    assert trained(model) == expected


@pytest.mark.parametrize("kind", KINDS)
def test_unwrap_gives_the_layers_their_own_codes_back(kind: str) -> None:
    def codes(model: nn.Module) -> list[bytes]:
        layers = [m for m in model.modules() if "bitsandbytes" in type(m).__module__]
        return [m.weight.data.numpy().tobytes() for m in layers if hasattr(m, "weight")]

    model = adapted(quantised(llama(), KINDS[kind]))
    before = codes(model)
    ids = torch.arange(24)[None]
    with torch.no_grad():
        logits = model(input_ids=ids).logits
    fluxtrain.wrap(model, device="cpu")
    trained(model)
    fluxtrain.unwrap(model)
    assert codes(model) == before
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.data.zero_()
    plain = quantised(llama(), KINDS[kind])
    with torch.no_grad():
        assert torch.equal(model(input_ids=ids).logits, plain(input_ids=ids).logits)
    assert logits.shape == (1, 24, 128)


def test_formats_that_cannot_be_taken_over_are_refused_and_the_model_stays() -> None:
    model = quantised(llama(), lambda linear: in_4_bits(linear, kind="fp4"))
    with pytest.raises(UnsupportedModel, match="quantised as fp4.*nf4 in blocks of 64"):
        fluxtrain.wrap(model, device="cpu")
    assert type(model.model.layers[0].self_attn.q_proj.weight).__name__ == "Params4bit"


def test_a_layer_that_lost_its_scales_is_refused() -> None:
    model = quantised(llama(), KINDS["int8"])
    model.model.layers[1].mlp.up_proj.weight.SCB = None
    with pytest.raises(UnsupportedModel, match=r"layers\.1\.mlp\.up_proj has lost part of itself"):
        fluxtrain.wrap(model, device="cpu")


def test_a_layer_that_is_not_quantised_yet_is_refused_with_the_cure() -> None:
    model = llama()
    linear = model.model.layers[0].self_attn.q_proj
    model.model.layers[0].self_attn.q_proj = bnb.nn.Linear4bit(
        linear.in_features, linear.out_features, bias=False, quant_type="nf4"
    )
    with pytest.raises(UnsupportedModel, match='frozen="nf4"'):
        fluxtrain.wrap(model, device="cpu")
