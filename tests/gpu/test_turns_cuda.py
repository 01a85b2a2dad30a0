"""Norms and biases, which are not decayed, are stepped with a block's matrices in one launch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from fluxtrain.optim import fused_device
from fluxtrain.stream.engine import engine_of
from fluxtrain.train.parameter_groups import parameter_groups
from tests.wrap_with import wrap_with

pytestmark = pytest.mark.gpu
CONFIG = {
    "vocab_size": 512, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": False,
}  # fmt: skip


def trained(dtype: torch.dtype, **options: Any) -> tuple[list[torch.Tensor], Any]:
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(Qwen2Config(**CONFIG)).to(dtype)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter)
    wrap_with(model, device="cuda", chunk_rows=2, **options)
    kinds = ("norms", "biases", "embeddings")
    groups = parameter_groups(model, learning_rate=1e-2, weight_decay=0.5, no_decay=kinds)
    optimizer = torch.optim.AdamW(groups)
    for step in range(4):
        torch.manual_seed(step)
        ids = torch.randint(0, 512, (4, 32))
        model(input_ids=ids, labels=ids).loss.backward()
        engine_of(model).clip_grad_norm(0.3)
        optimizer.step()
        optimizer.zero_grad()
    engine_of(model).flush()
    return [p.detach().cpu().clone() for p in model.parameters()], engine_of(model)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_block_on_the_gpu_is_stepped_in_one_launch_with_the_bits_of_one_at_home(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    launches, launch = [0], fused_device._launch_

    def counted(*args: Any, **kwargs: Any) -> None:
        launches[0] += 1
        launch(*args, **kwargs)

    monkeypatch.setattr(fused_device, "_launch_", counted)
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        resident, engine = trained(dtype, offload="none")
        assert launches[0] == 4 * sum(bool(group.trained) for group in engine.groups)
        at_home, _ = trained(dtype, offload="weights", device_groups=0)
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(one, other) for one, other in zip(resident, at_home, strict=True))
