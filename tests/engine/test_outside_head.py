"""Code that multiplies by the head's weight itself, as TRL's fused loss does, computes on the
device; adapters that come after `wrap` are taken in."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn

import fluxtrain
from fluxtrain.core.wrap.engine import engine_of
from fluxtrain.errors import MisusedModel
from fluxtrain.plan import states
from tests.wrap_with import wrap_with

Make = Callable[..., Any]
IDS = torch.arange(24).reshape(2, 12) * 7 % 320


def fuse(model: nn.Module, seen: list[Any] | None = None) -> nn.Module:
    """Patch a model's forward as TRL 1.16 does: the loss is made of the head's weight."""
    original = model.forward

    def forward(self: Any, *args: Any, fused_lm_head: bool = False, **kwargs: Any) -> Any:
        if not fused_lm_head:
            return original(*args, **kwargs)
        labels = kwargs.pop("labels")
        hidden = self.base_model(*args, **kwargs).last_hidden_state[:, :-1]
        head = self.get_output_embeddings()
        if seen is not None:
            seen.append(head)
        hidden, labels = hidden.to(head.weight.device), labels.to(head.weight.device)
        logits = nn.functional.linear(hidden, head.weight, head.bias).float()
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten())
        return types.SimpleNamespace(loss=loss)

    model.forward = types.MethodType(forward, model)  # type: ignore[method-assign]
    return model


def gradients_of(model: nn.Module, **inputs: Any) -> dict[str, Tensor]:
    model(input_ids=IDS, labels=IDS, **inputs).loss.backward()
    found = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return found


@pytest.mark.parametrize("family", ["llama", "qwen2", "gpt2"])  # the last two are tied
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_gradients_of_a_trained_head_are_those_of_the_plain_model(
    family: str, dtype: torch.dtype, new_model: Make, close: Any
) -> None:
    plain = fuse(new_model(family, dtype)).eval()
    model = wrap_with(fuse(new_model(family, dtype)), device="cpu").eval()
    expected = gradients_of(plain, fused_lm_head=True)
    for _ in range(2):
        found = gradients_of(model, fused_lm_head=True)
        close(expected, found, 1e-5 if dtype == torch.float32 else 2e-2)
    fluxtrain.unwrap(model)


def test_the_weight_is_that_of_the_devices_slot(new_model: Make) -> None:
    seen: list[Any] = []
    model = fuse(new_model("llama"), seen)
    fluxtrain.wrap(model, device="cpu", offload="weights")
    engine = engine_of(model)
    head = next(unit for unit in engine.units if unit.is_head)
    at_home = head.group.memory.views[0].data_ptr()
    gradients_of(model, fused_lm_head=True)
    weight = seen[0].weight
    slots = [slot.flat for slot in engine.cards[0].window.slots]
    inside = [s for s in slots if s.data_ptr() <= weight.data_ptr() < s.data_ptr() + s.nbytes]
    assert weight.data_ptr() != at_home and len(inside) == 1
    assert model.get_output_embeddings() is model.lm_head, "only while the fused forward runs"
    fluxtrain.unwrap(model)


def test_a_head_in_vocabulary_chunks_is_copied_whole_and_that_is_said(
    new_model: Make, close: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    model = new_model("llama")
    expected = gradients_of(fuse(new_model("llama")), fused_lm_head=True)
    request = fluxtrain.PlacementRequest(head="chunks", offload="max")
    fluxtrain.wrap(fuse(model), device="cpu", placement=request)
    unit = next(unit for unit in engine_of(model).units if unit.is_head)
    assert unit.in_vocab_chunks
    close(expected, gradients_of(model, fused_lm_head=True), 1e-5)
    assert not unit.in_vocab_chunks
    assert "TRL's fused loss" in " ".join(engine_of(model)._said)
    fluxtrain.unwrap(model)


# -- adapters after wrap ---------------------------------------------------------------------------


def adapted(model: nn.Module) -> Any:
    torch.manual_seed(11)
    config = LoraConfig(r=4, target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM")
    return get_peft_model(model, config)  # type: ignore[arg-type]


def steps(model: nn.Module, count: int = 4) -> list[float]:
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer, losses = torch.optim.AdamW(trained, lr=1e-2), []
    for _ in range(count):
        loss = model(input_ids=IDS, labels=IDS).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def test_adapters_that_come_after_wrap_train_as_those_before(new_model: Make) -> None:
    before = fluxtrain.wrap(adapted(new_model("llama")), device="cpu")
    after = adapted(fluxtrain.wrap(new_model("llama"), device="cpu"))
    assert steps(after) == steps(before)
    names = [n for n, p in after.named_parameters() if p.requires_grad]
    assert names and all("lora_" in name for name in names)


def test_on_a_packed_base_they_are_refused_with_the_order_that_works(
    new_model: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(states, "LEAST_PACKED", 1024)
    model = new_model("llama", torch.bfloat16)
    model.requires_grad_(False)
    late = adapted(fluxtrain.wrap(model, device="cpu", frozen="nf4"))
    with pytest.raises(MisusedModel, match=r"base is packed.*wrap\(get_peft_model\(model"):
        late(input_ids=IDS, labels=IDS)
    early = fluxtrain.wrap(adapted(new_model("llama", torch.bfloat16)), device="cpu", frozen="nf4")
    losses = steps(early)
    assert losses[-1] < losses[0]
