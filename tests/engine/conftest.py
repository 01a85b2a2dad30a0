"""Tiny models in real Hugging Face folders: random weights, a tokenizer, a chat template."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from fluxtrain.data.demo import train_tokenizer

VOCABULARY = 320
SENTENCES = [
    "the quick brown fox jumps over the lazy dog",
    "a model is trained block by block, and each block is streamed through the device",
    "what is two and two? it is four, and three and three is six",
] * 20


def _llama_shape(tied: bool) -> dict[str, object]:
    return {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        "tie_word_embeddings": tied,
        "bos_token_id": None,
        "eos_token_id": 0,
        "pad_token_id": 0,
    }


def tiny_model(family: str, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """A two-block model of `family` (llama, qwen2, qwen3, gpt2) with fixed random weights."""
    torch.manual_seed(7)
    if family == "llama":
        model: PreTrainedModel = LlamaForCausalLM(LlamaConfig(**_llama_shape(tied=False)))
    elif family == "qwen2":
        model = Qwen2ForCausalLM(Qwen2Config(**_llama_shape(tied=True)))
    elif family == "qwen3":
        model = Qwen3ForCausalLM(Qwen3Config(**_llama_shape(tied=True), head_dim=8))
    elif family == "gpt2":
        config = GPT2Config(
            vocab_size=VOCABULARY, n_embd=32, n_layer=2, n_head=4, n_positions=128,
            bos_token_id=0, eos_token_id=0,
        )  # fmt: skip
        model = GPT2LMHeadModel(config)
    else:
        raise ValueError(family)
    return model.to(dtype)


@pytest.fixture(scope="session")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A trained byte-level BPE with a chat template that marks the assistant's tokens."""
    folder = tmp_path_factory.mktemp("tokenizer")
    train_tokenizer(SENTENCES, folder, VOCABULARY)
    return folder


@pytest.fixture(scope="session")
def _model_folders(
    tmp_path_factory: pytest.TempPathFactory, tokenizer_folder: Path
) -> Callable[[str, torch.dtype], Path]:
    made: dict[tuple[str, torch.dtype], Path] = {}

    def folder_of(family: str, dtype: torch.dtype) -> Path:
        if (family, dtype) not in made:
            folder = tmp_path_factory.mktemp(family) / "model"
            shutil.copytree(tokenizer_folder, folder)
            tiny_model(family, dtype).save_pretrained(folder)
            made[family, dtype] = folder
        return made[family, dtype]

    return folder_of


@pytest.fixture
def model_folder(
    _model_folders: Callable[[str, torch.dtype], Path], tmp_path: Path
) -> Callable[..., Path]:
    """`model_folder(family, dtype)`: a fresh copy of a tiny model's folder, to damage at will."""

    def fresh(family: str = "llama", dtype: torch.dtype = torch.float32) -> Path:
        folder = tmp_path / f"{family}-{str(dtype).removeprefix('torch.')}"
        shutil.copytree(_model_folders(family, dtype), folder)
        return folder

    return fresh
