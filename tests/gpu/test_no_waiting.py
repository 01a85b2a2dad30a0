"""A training step on a GPU never makes the host wait for the device."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from fluxtrain.core.wrap.engine import engine_of
from fluxtrain.models.known_packing import known_packing
from tests.wrap_with import wrap_with

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]


@pytest.fixture
def waiting_is_an_error() -> Iterator[None]:
    yield
    torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("in_backward", [False, True])
@pytest.mark.parametrize(
    "placement",
    [
        {"offload": "weights", "device_groups": 0, "resident_blocks": 0},
        {
            "offload": "weights",
            "device_groups": 0,
            "resident_blocks": 0,
            "deferred_moments": True,
        },
        {"offload": "weights", "device_groups": 3, "resident_blocks": 1},
        {"offload": "weights", "device_groups": 0, "activations": "host"},
        {"offload": "weights", "device_groups": 0, "embedding": "rows", "head": "chunks"},
        {"offload": "none"},
    ],
)
def test_no_operation_of_a_step_synchronises(
    in_backward: bool, placement: dict[str, object], waiting_is_an_error: None
) -> None:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=256, intermediate_size=512, num_hidden_layers=8, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=1024, max_position_embeddings=256,
    )  # fmt: skip
    model = LlamaForCausalLM(config).to(torch.bfloat16).train()
    wrap_with(model, device="cuda", chunk_rows=4, overlap=True, **placement)  # type: ignore[arg-type]
    engine = engine_of(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    ids = torch.randint(0, 1024, (8, 64)).pin_memory()
    losses = []
    for step in range(10):
        if step == 5:  # the first steps look at what they computed
            torch.cuda.synchronize()
            torch.cuda.set_sync_debug_mode("error")
        with known_packing(mixes=False):
            loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        if in_backward:
            engine.begin_step_in_backward(optimizer, loss)
        loss.backward()
        norm = engine.clip_grad_norm(None if in_backward else 1.0, [loss.detach()])
        optimizer.step()
        optimizer.zero_grad()
        losses.append(norm)
    torch.cuda.set_sync_debug_mode("default")
    values = [norm.losses()[0] for norm in losses]
    assert values[-1] < values[0]
