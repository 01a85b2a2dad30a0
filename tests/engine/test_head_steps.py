"""Soft caps, scales and constants between head and loss are computed in chunks, and so is the loss
of a head that has adapters in it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import Gemma2Config, Gemma2ForCausalLM, LlamaConfig, LlamaForCausalLM

import fluxtrain
from fluxtrain.core.head.lazy_logits import LazyLogits
from fluxtrain.core.wrap.engine import engine_of
from fluxtrain.plan import heads
from tests.engine.head_models import WIDTH, WORDS, Tower, agree, batch, cross_entropy
from tests.engine.test_uncomputed_logits import log_loss
from tests.wrap_with import wrap_with

CONSTANT = torch.linspace(-1, 1, WORDS)
STEPS: dict[str, Callable[[Any], Any]] = {
    "soft cap": lambda logits: torch.tanh(logits / 3.0) * 3.0,
    "soft cap of fp32": lambda logits: (logits.float() / 3.0).tanh() * 3.0,
    "scale": lambda logits: 0.25 * logits,
    "scale of a tensor": lambda logits: logits * torch.tensor(0.25),
    "constant": lambda logits: logits + CONSTANT.view(1, 1, -1),
    "constant and cap": lambda logits: torch.tanh((logits + CONSTANT).float()),
}
NOT_STEPS: dict[str, Callable[[Any], Any]] = {
    "a scale a token": lambda logits: logits * torch.linspace(0, 1, logits.shape[1])[:, None],
    "in place": lambda logits: logits.clone().mul_(0.5),
    "a trained scale": lambda logits: logits * torch.ones((), requires_grad=True),
    "by itself": lambda logits: logits * logits,
}


class Capped(Tower):
    """A tower that does something with its logits."""

    step: Callable[[Any], Any]

    def forward(self, ids: Tensor) -> Tensor:
        found: Tensor = self.step(super().forward(ids))
        return found


def capped(step: str, dtype: torch.dtype, **shape: bool) -> Capped:
    model = Capped(**shape)
    model.step = {**STEPS, **NOT_STEPS}[step]
    return model.to(dtype)


@pytest.fixture(params=["whole", "chunks"])
def head(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """How the head is copied; chunks are of 16 words of 50, or 32 in bf16."""
    monkeypatch.setattr(heads, "VOCAB_CHUNK_BYTES", 16 * WIDTH * 4)
    monkeypatch.setattr(heads, "MULTIPLE_ROWS", 8)
    found: str = request.param
    return found


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_the_loss_behind_steps_equals_torchs_and_no_whole_logits_are_made(
    head: str, step: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrapped = wrap_with(capped(step, dtype, bias=True), device="cpu", head=head)
    engine_of(wrapped).head_tokens = 4
    monkeypatch.setattr(LazyLogits, "computed", lambda self: pytest.fail("they were computed"))
    rtol = 1e-5 if dtype == torch.float32 else 2e-2
    agree(capped(step, dtype, bias=True), wrapped, cross_entropy(), ignored=4, rtol=rtol)


@pytest.mark.parametrize("step", [*STEPS, *NOT_STEPS])
def test_losses_that_read_logits_behind_steps_equal_torchs(head: str, step: str) -> None:
    plain = capped(step, torch.float32)
    wrapped = wrap_with(capped(step, torch.float32), device="cpu", head=head)
    agree(plain, wrapped, log_loss)
    agree(plain, wrapped, lambda logits, targets: logits.float().square().mean())


def test_a_gemma_2_makes_no_whole_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    config = Gemma2Config(
        vocab_size=WORDS, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=8, final_logit_softcapping=2.0,
    )  # fmt: skip
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(Gemma2ForCausalLM(config))
    wrapped = fluxtrain.wrap(models[1])
    monkeypatch.setattr(LazyLogits, "computed", lambda self: pytest.fail("they were computed"))
    same_gradients(models[0], wrapped)


# --- heads with adapters --------------------------------------------------------------------------

ADAPTERS: dict[str, dict[str, Any]] = {
    "of the head": {"target_modules": ["q_proj", "lm_head"]},
    "beside a head that is trained": {"modules_to_save": ["lm_head"]},
    "beside head and embedding": {"modules_to_save": ["lm_head", "embed_tokens"]},
    "of some words": {"trainable_token_indices": [3, 49]},
}


def with_adapters(kind: str, tied: bool = False) -> nn.Module:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=WORDS, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=tied,
    )  # fmt: skip
    settings = {"target_modules": ["q_proj"], **ADAPTERS[kind]}
    model = get_peft_model(LlamaForCausalLM(config), LoraConfig(r=4, **settings))
    numbers = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = torch.randn(parameter.shape, generator=numbers) / 8
    return model


def same_gradients(plain: Any, wrapped: Any) -> None:
    ids = batch()[0]
    losses = []
    for model in (plain, wrapped):
        losses.append(model(input_ids=ids, labels=ids).loss)
        losses[-1].backward()
    torch.testing.assert_close(losses[1], losses[0])
    named = dict(wrapped.named_parameters())
    trained = [(name, p) for name, p in plain.named_parameters() if p.requires_grad]
    assert trained
    for name, parameter in trained:
        torch.testing.assert_close(named[name].grad, parameter.grad, msg=lambda t, n=name: n + t)


@pytest.mark.parametrize("kind", ADAPTERS)
@pytest.mark.parametrize("tied", [False, True], ids=["apart", "tied"])
def test_a_head_with_adapters_has_the_plain_models_gradients_in_chunks(
    kind: str, tied: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrapped = fluxtrain.wrap(with_adapters(kind, tied))
    engine_of(wrapped).head_tokens = 5
    monkeypatch.setattr(LazyLogits, "computed", lambda self: pytest.fail("they were computed"))
    same_gradients(with_adapters(kind, tied), wrapped)
