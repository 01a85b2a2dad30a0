"""On a GPU, answers and losses of models that stream through it are those of resident ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from fluxtrain.data.demo import train_tokenizer
from fluxtrain.models.generate.batch import write
from fluxtrain.models.generate.sampling import Sampling
from fluxtrain.results.evaluate_model import EvaluationRequest, evaluate_model
from fluxtrain.results.generation_session import measure, rows_that_fit
from fluxtrain.results.opened import ModelRequest, open_model

pytestmark = pytest.mark.gpu
PROMPTS = [[5, 90, 91, 92, 93, 17], [31, 32, 33], list(range(60, 80))]
GREEDY = Sampling(max_new_tokens=12, temperature=0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("model")
    train_tokenizer(["the quick brown fox jumps over the lazy dog"] * 40, made, 320)
    torch.manual_seed(5)
    config = LlamaConfig(
        vocab_size=len(AutoTokenizer.from_pretrained(made)), hidden_size=128,
        intermediate_size=256, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2,
        max_position_embeddings=128, eos_token_id=0, pad_token_id=0, bos_token_id=None,
    )  # fmt: skip
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(made)
    return made


def request(folder: Path, offload: str) -> ModelRequest:
    return ModelRequest(named=str(folder), device="cuda", offload=offload)


def test_answers_of_streamed_blocks_are_those_of_resident_ones(folder: Path) -> None:
    found: list[Any] = []
    for offload in ("max", "none"):
        model = open_model(request(folder, offload), lambda _: None)
        try:
            found.append([one.tokens for one in write(model, PROMPTS, GREEDY)])
            measured = measure(model, rows=2)
            assert (
                measured.pass_s > 0
                and sum(measured.cache_bytes_per_token.values()) == 2 * 4 * 2 * 32 * 2
            )
            assert rows_that_fit(model, measured, 20, 12) == 64
        finally:
            model.close()
    assert found[0] == found[1] and all(found[0])


def test_losses_of_streamed_blocks_are_those_of_resident_ones(folder: Path, tmp_path: Path) -> None:
    data = tmp_path / "texts.jsonl"
    data.write_text("".join(json.dumps({"text": f"the fox {n} jumps"}) + "\n" for n in range(40)))
    losses = [
        evaluate_model(
            EvaluationRequest(model=request(folder, offload), data=str(data)), lambda _: None
        ).loss
        for offload in ("max", "none")
    ]
    assert losses[0] == losses[1]
