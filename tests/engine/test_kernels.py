"""Liger's kernels are used where they can be, and what prevents them is said."""

from __future__ import annotations

import os
import sys
from copy import deepcopy
from types import MethodType, ModuleType
from typing import Any

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from fluxtrain.errors import BadInput
from fluxtrain.models import kernels
from fluxtrain.models.kernels import choose_kernels, fuses_loss


@pytest.fixture
def model() -> LlamaForCausalLM:
    return LlamaForCausalLM(
        LlamaConfig(
            hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
            vocab_size=16,
        )
    )  # fmt: skip


@pytest.fixture
def liger(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """A package of that name which notes what it was asked to do."""
    asked: list[dict[str, Any]] = []
    package, inner, patch = (
        ModuleType(f"liger_kernel{name}") for name in ("", ".transformers", ".x.monkey_patch")
    )
    package.__spec__ = object()  # type: ignore[assignment]  # find_spec wants one
    patch.MODEL_TYPE_TO_APPLY_LIGER_FN = {"llama": None}  # type: ignore[attr-defined]
    patch._apply_liger_kernel_to_instance = lambda **kw: asked.append(kw)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "liger_kernel", package)
    monkeypatch.setitem(sys.modules, "liger_kernel.transformers", inner)
    monkeypatch.setitem(sys.modules, "liger_kernel.transformers.monkey_patch", patch)
    monkeypatch.setattr(kernels, "version", lambda _: "0.8.5")
    for name in kernels.READ_AT_IMPORT:
        monkeypatch.setenv(name, "")  # so that it is as before afterwards
        monkeypatch.delenv(name)
    return asked


def test_on_a_gpu_ligers_kernels_are_applied_without_its_losses(
    model: LlamaForCausalLM, liger: list[dict[str, Any]]
) -> None:
    choice = choose_kernels("auto", model, "cuda")
    assert choice.value == "liger"
    assert "0.8.5" in choice.because
    assert liger == [{"model": model, "fused_linear_cross_entropy": False, "cross_entropy": False}]
    assert choose_kernels("liger", model, "cuda").because == "as set"
    assert os.environ["TRITON_CACHE_AUTOTUNING"] == "1", "what Triton tunes is kept"
    assert os.environ["LIGER_FUSED_MOE_AUTOTUNE"] == "0", "no minutes go into tuning experts"


def test_a_sharded_model_gets_ligers_loss_where_its_head_is_plain(
    model: LlamaForCausalLM, liger: list[dict[str, Any]]
) -> None:
    seen: list[tuple[Any, bool | None]] = []

    def forward(self: Any, labels: Any = None, skip_logits: bool | None = None) -> None:
        seen.append((self, skip_logits))

    model.forward = MethodType(forward, model)  # type: ignore[method-assign]  # as liger does
    choose_kernels("auto", model, "cuda", with_loss=True)
    assert liger[-1]["fused_linear_cross_entropy"]
    model(labels=1)
    model()
    copied = deepcopy(model)
    copied(labels=1)
    assert seen == [(model, True), (model, False), (copied, True)]  # prompts need logits
    model.lm_head.bias = nn.Parameter(torch.zeros(16))
    assert not fuses_loss("auto", model)
    model.lm_head = nn.Sequential(model.lm_head)  # type: ignore[assignment]  # as with an adapter
    assert not fuses_loss("auto", model) and not fuses_loss("torch", model)
    choose_kernels("auto", model, "cuda", with_loss=True)
    assert not liger[-1]["fused_linear_cross_entropy"]


@pytest.mark.parametrize("wished", ["torch", "auto"])
def test_without_a_gpu_or_a_wish_the_model_stays_as_it_is(
    model: LlamaForCausalLM, liger: list[dict[str, Any]], wished: Any
) -> None:
    device = "cuda" if wished == "torch" else "cpu"
    assert choose_kernels(wished, model, device).value == "torch"
    assert liger == []


def test_a_model_that_liger_does_not_know_keeps_its_own_kernels(
    model: LlamaForCausalLM, liger: list[dict[str, Any]]
) -> None:
    model.config.model_type = "strange"
    assert "does not know strange" in choose_kernels("auto", model, "cuda").because
    with pytest.raises(BadInput, match="strange.*leave it on auto"):
        choose_kernels("liger", model, "cuda")
    assert liger == []


def test_without_the_package_auto_says_how_to_get_it(
    model: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    assert "pip install liger-kernel" in choose_kernels("auto", model, "cuda").because
