"""A model on the second GPU while the first is torch's current one, and a run that names the second
alone; skipped where there is one."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

import fluxtrain
from fluxtrain.core.wrap.engine import engine_of
from tests.gpu.exactly import exactly
from tests.wrap_with import wrap_with

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two NVIDIA GPUs"),
]
CONFIG = {
    "vocab_size": 512, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": False,
}  # fmt: skip


@pytest.fixture(autouse=True)
def deterministic() -> Iterator[None]:
    with exactly():
        yield


def trained(device: str, **options: Any) -> tuple[list[float], list[torch.Tensor]]:
    """Losses of four clipped steps, and the weights after them."""
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(Qwen2Config(**CONFIG)).to(torch.bfloat16).train()
    wrap_with(model, device=device, chunk_rows=2, overlap=True, **options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for step in range(4):
        torch.manual_seed(step)
        ids = torch.randint(0, 512, (4, 32))
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        engine_of(model).clip_grad_norm(0.3)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    fluxtrain.sync(model)
    return [float(loss) for loss in losses], [p.detach().cpu().clone() for p in model.parameters()]


@pytest.mark.parametrize(
    "options",
    [
        {"offload": "none"},
        {"offload": "none", "states": "8bit"},
        {"offload": "none", "states": "bf16"},
        {"offload": "weights", "device_groups": 2},
        {"offload": "weights", "device_groups": 0, "embedding": "rows", "head": "chunks"},
    ],
    ids=lambda options: "-".join(map(str, options.values())),
)
def test_a_model_on_a_gpu_that_is_not_current_trains_to_the_bits_of_one_on_the_current(
    options: dict[str, Any],
) -> None:
    with torch.cuda.device(0):
        losses, weights = trained("cuda:0", **options)
        other_losses, other_weights = trained("cuda:1", **options)
        assert torch.cuda.current_device() == 0
    assert other_losses == losses
    assert all(torch.equal(a, b) for a, b in zip(weights, other_weights, strict=True))


TRAIN = """
import json, sys, torch
from pathlib import Path
from fluxtrain.train.checkpoint.recovery import locate
from fluxtrain.config.schema import validate
from fluxtrain.train.run import train
config = validate({
    "model": {"path": "demo"}, "data": {"path": "demo"}, "parallel": {"cards": [1]},
    "train": {"steps": 3, "batch_rows": 4}, "placement": {"budget_gib": 8},
})
train(config, locate(None, Path(sys.argv[1]), config))
print(json.dumps([torch.cuda.max_memory_allocated(card) for card in range(2)]))
"""


def test_a_run_that_names_the_second_gpu_is_measured_planned_and_trained_there_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))  # so that a block is timed
    finished = subprocess.run(
        [sys.executable, "-c", TRAIN, str(tmp_path / "run")],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert finished.returncode == 0, finished.stderr
    first, second = json.loads(finished.stdout.splitlines()[-1])
    assert first == 0 < second
