"""With liger's kernels, and with the engine's own fused loss, a training follows torch's.

Tolerances are those of liger-kernel's own tests (https://github.com/linkedin/Liger-Kernel), which
compare its kernels with Hugging Face's modules:

- Losses, of every step: relative 2e-5 and absolute 1e-8 in fp32, 1e-2 and 1e-3 in bf16, as for
  `mini_llama3` in test/convergence (fp32 and bf16), there over 32 steps at a learning rate of 1e-4.
- The fused linear cross entropy: relative 5e-4 and absolute 1e-5 in fp32, 5e-2 and 5e-3 in bf16,
  as in test/transformers/test_fused_linear_cross_entropy.py.

They have none for the norm of the gradients. It is one number over all of them, so that roundings
average out: 1e-3 in fp32, and 1e-2 in bf16, as for the loss. Theirs for weights (absolute 5e-3 in
fp32) is more than a weight moves here at all. So weights may be apart by a share of how far they
moved: each of them in fp32, where AdamW makes a step of the same size of every gradient that is not
zero; all together in bf16, whose roundings turn the smallest gradients around.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM
from transformers.models.llama import modeling_llama
from transformers.models.qwen2 import modeling_qwen2

import fluxtrain
from fluxtrain.core.wrap.engine import engine_of
from fluxtrain.models.kernels import choose_kernels
from tests.wrap_with import wrap_with

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]

FP32, BF16 = torch.float32, torch.bfloat16
LOSS = {FP32: (2e-5, 1e-8), BF16: (1e-2, 1e-3)}  # relative, absolute
OF_ITS_WAY = {FP32: 0.05, BF16: 0.7}  # how far weights may be apart
NORM = {FP32: (1e-3, 0.0), BF16: (1e-2, 0.0)}
STEPS, WORDS, WIDTH, ROWS, TOKENS = 6, 2048, 512, 8, 128
# A loss hardly depends on the keys' bias, which attention takes out but for the positions.
NEARLY_FREE = {f"model.layers.{i}.self_attn.k_proj.bias" for i in range(4)}
FAMILIES: dict[str, tuple[Any, Any, ModuleType]] = {
    "llama": (LlamaConfig, LlamaForCausalLM, modeling_llama),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM, modeling_qwen2),
}
Weights = dict[str, Tensor]
PLACES: list[dict[str, Any]] = [
    {"offload": "none"},
    {"offload": "weights", "device_groups": 0, "resident_blocks": 0},
]


@pytest.fixture(autouse=True)
def liger_is_taken_out_again() -> Iterator[None]:
    plain = {module: dict(vars(module)) for *_, module in FAMILIES.values()}
    yield
    for module, names in plain.items():
        vars(module).update(names)


def small_model(family: str, dtype: torch.dtype) -> Any:
    config_of, model_of, _ = FAMILIES[family]
    torch.manual_seed(0)
    config = config_of(
        hidden_size=WIDTH, intermediate_size=2 * WIDTH, num_hidden_layers=4,
        num_attention_heads=8, num_key_value_heads=2, vocab_size=WORDS,
        max_position_embeddings=TOKENS, tie_word_embeddings=False,
    )  # fmt: skip
    return model_of(config).to(dtype).train()


def trained(
    model: Any, kernels: Any, placement: dict[str, Any], device: str = "cuda"
) -> tuple[Tensor, Tensor, Weights]:
    """Losses and gradient norms (STEPS,), and the weights after them."""
    assert choose_kernels(kernels, model, device).value == kernels
    wrap_with(model, device=device, chunk_rows=4, overlap=True, **placement)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    words = torch.Generator().manual_seed(1)
    norms = []
    for _ in range(STEPS):
        ids = torch.randint(0, 64, (ROWS, TOKENS), generator=words)
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        norms.append(engine_of(model).clip_grad_norm(1.0, [loss.detach()]))
        optimizer.step()
        optimizer.zero_grad()
    losses = torch.tensor([norm.losses()[0] for norm in norms])
    values = torch.tensor([norm.value() for norm in norms])
    fluxtrain.unwrap(model)
    return losses, values, weights_of(model)


def weights_of(model: nn.Module) -> Weights:
    return {name: weight.detach().double().cpu() for name, weight in model.named_parameters()}


@pytest.mark.parametrize("placement", PLACES, ids=["resident", "streamed"])
@pytest.mark.parametrize("dtype", [FP32, BF16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_training_with_ligers_kernels_follows_torchs(
    family: str, dtype: torch.dtype, placement: dict[str, Any]
) -> None:
    pytest.importorskip("liger_kernel")
    module = FAMILIES[family][2]
    rotary = vars(module)["apply_rotary_pos_emb"]
    before = weights_of(small_model(family, dtype))
    losses, norms, weights = trained(small_model(family, dtype), "torch", placement)
    assert vars(module)["apply_rotary_pos_emb"] is rotary
    of_liger = trained(small_model(family, dtype), "liger", placement)
    assert vars(module)["apply_rotary_pos_emb"] is not rotary  # its kernels were there
    assert losses[-1] < losses[0] - 0.1  # they were trained
    agree(of_liger[0], losses, LOSS[dtype])
    agree(of_liger[1], norms, NORM[dtype])
    assert apart(of_liger[2], weights, before) < OF_ITS_WAY[dtype]
    if dtype is FP32:
        for name in before.keys() - NEARLY_FREE:
            of_one = ({name: each[name]} for each in (of_liger[2], weights, before))
            assert apart(*of_one) < OF_ITS_WAY[dtype], name


def apart(found: Weights, expected: Weights, before: Weights) -> float:
    """How far weights are from what is expected, of how far that is from where they began."""
    off = [float((found[name] - expected[name]).norm()) for name in expected]
    way = [float((expected[name] - before[name]).norm()) for name in expected]
    return math.hypot(*off) / math.hypot(*way)


def agree(found: Tensor, expected: Tensor, within: tuple[float, float]) -> None:
    torch.testing.assert_close(found, expected, rtol=within[0], atol=within[1])
