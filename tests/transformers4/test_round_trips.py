"""What is saved computes the same in transformers 4 as in 5, wherever the model came from.

`make test-transformers4` makes an environment with transformers 4 and runs these.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer

from fluxtrain.config.schema import MethodSettings, ModelSettings
from fluxtrain.data.demo import train_tokenizer
from fluxtrain.methods.adapters import attach_adapters, save_adapter
from fluxtrain.models.export import save_model
from fluxtrain.models.loading import ModelSource, load_model
from tests.engine.conftest import SENTENCES, VOCABULARY
from tests.transformers4.with_4 import IDS, TEXT, loaded

PYTHON = os.environ.get("FLUXTRAIN_TRANSFORMERS4", "")
pytestmark = pytest.mark.skipif(not PYTHON, reason="needs transformers 4: make test-transformers4")

SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": None,
    "eos_token_id": 0,
    "pad_token_id": 0,
    "initializer_range": 0.2,  # attention is far from uniform, so that positions count
}
LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}  # fmt: skip
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
LONG = {"short_factor": [1.1] * 4, "long_factor": [2.0] * 4}
WINDOW = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 8}
PLAIN = {"rope_type": "default"}
LOCAL = {**PLAIN, "rope_theta": 7e3}
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "head_dim": 8}

# By version 5: the class of the configuration, and its rotary embeddings in version 5's words.
OF_5: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {"rope_parameters": {**LLAMA3, "rope_theta": 5e5}}),
    "llama-plain": ("LlamaConfig", {"rope_parameters": {**PLAIN, "rope_theta": 3e5}}),
    "qwen2": ("Qwen2Config", {"rope_parameters": {**YARN, "rope_theta": 1e6}}),
    "qwen3": ("Qwen3Config", {"head_dim": 8, "tie_word_embeddings": True}),
    "qwen3-moe": ("Qwen3MoeConfig", MOE),
    "mixtral": ("MixtralConfig", {"num_local_experts": 4}),
    "mistral": ("MistralConfig", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}),
    "gemma3": (
        "Gemma3TextConfig",
        {"head_dim": 8, **WINDOW, "rope_parameters": {
            "sliding_attention": LOCAL,
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 9e5}}},
    ),
    "phi3": (
        "Phi3Config",
        {"original_max_position_embeddings": 16, "rope_parameters": {
            "rope_type": "longrope", **LONG, "rope_theta": 2e4}},
    ),
    "gpt-neox": (
        "GPTNeoXConfig",
        {"rope_parameters": {
            "rope_type": "default", "rope_theta": 3e4, "partial_rotary_factor": 0.5}},
    ),
    "stablelm": (
        "StableLmConfig",
        {"rope_parameters": {
            "rope_type": "default", "rope_theta": 3e4, "partial_rotary_factor": 0.5}},
    ),
    "olmo3": ("Olmo3Config", {**WINDOW, "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 4e5},
        "full_attention": {**YARN, "rope_theta": 4e5}}}),
    "gpt2": ("GPT2Config", {}),
}  # fmt: skip

# By version 4, in its words.
OF_4: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {"rope_theta": 5e5, "rope_scaling": LLAMA3}),
    "llama-older": ("LlamaConfig", {"rope_scaling": {"type": "linear", "factor": 2.0}}),
    "qwen3": ("Qwen3Config", {"head_dim": 8, "rope_theta": 1e6, "tie_word_embeddings": True}),
    "qwen3-moe": ("Qwen3MoeConfig", {**MOE, "rope_theta": 1e6}),
    "mixtral": ("MixtralConfig", {"num_local_experts": 4}),
    "gemma3": (
        "Gemma3TextConfig",
        {"head_dim": 8, **WINDOW, "rope_theta": 9e5, "rope_local_base_freq": 7e3,
         "rope_scaling": {"rope_type": "linear", "factor": 8.0}},
    ),
    "phi3": (
        "Phi3Config",
        {"original_max_position_embeddings": 16, "rope_theta": 2e4,
         "rope_scaling": {"type": "longrope", **LONG}},
    ),
    "gpt-neox": ("GPTNeoXConfig", {"rotary_emb_base": 30_000, "rotary_pct": 0.5}),
    "stablelm": ("StableLmConfig", {"rope_theta": 30_000, "partial_rotary_factor": 0.5}),
    "olmo3": ("Olmo3Config", {**WINDOW, "rope_theta": 5e5, "rope_scaling": YARN}),
}  # fmt: skip

Trained = dict[str, Path]


def python4(*arguments: object) -> None:
    script = Path(__file__).with_name("with_4.py")
    done = subprocess.run(
        [PYTHON, str(script), *map(str, arguments)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    train_tokenizer(SENTENCES, folder, VOCABULARY)
    made = AutoTokenizer.from_pretrained(folder)
    made.add_special_tokens({"extra_special_tokens": ["<|tool|>", "<|end|>"]})
    made.save_pretrained(folder)
    return folder


def trained(folder: Path, to: Path, dtype: str = "auto") -> None:
    """Load, change the weights a little, and save as a run does."""
    source = load_model(ModelSource(path=str(folder), dtype=dtype))
    with torch.no_grad():
        for parameter in source.model.parameters():
            parameter.mul_(1.01)
    source.model.generation_config.eos_token_id = [0, 3]
    save_model(source.model, source.tokenizer, to, source.beside)


def adapted(folder: Path, to: Path) -> None:
    """Load, put an adapter beside it, and save that as a run does."""
    base = load_model(ModelSource(path=str(folder)))
    settings = MethodSettings(name="lora", rank=4)
    attach_adapters(base.model, settings, ModelSettings(path=str(folder)))
    with torch.no_grad():
        for parameter in base.model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1)
    base.model.generation_config.eos_token_id = [0, 3]
    save_adapter(base, "plain", to)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory, tokenizer: Path) -> Trained:
    """Trained models by their source, `4-llama` or `5-llama`."""
    root = tmp_path_factory.mktemp("models")
    python4("make", _shapes(root), _of_4(tokenizer, root / "tokenizer"))
    for name, (kind, changes) in OF_5.items():
        torch.manual_seed(5)
        config = getattr(transformers, kind)(**_sizes(kind), **changes)
        model = AutoModelForCausalLM.from_config(config)
        model.save_pretrained(root / f"5-{name}")
        AutoTokenizer.from_pretrained(tokenizer).save_pretrained(root / f"5-{name}")
    names = [*(f"4-{name}" for name in OF_4), *(f"5-{name}" for name in OF_5)]
    for name in names:
        trained(root / name, root / f"{name}-trained")
    trained(root / "4-llama", root / "4-llama-bf16-trained", "bfloat16")
    adapted(root / "5-qwen3", root / "adapter-trained")
    return {path.name.removesuffix("-trained"): path for path in root.glob("*-trained")}


def _sizes(kind: str) -> dict[str, Any]:
    if kind == "GPT2Config":
        return {"vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 2, "n_head": 4,
                "n_positions": 128, "bos_token_id": 0, "eos_token_id": 0}  # fmt: skip
    return SIZES


def _shapes(root: Path) -> Path:
    shapes = {
        str(root / f"4-{name}"): (kind, {**_sizes(kind), **changes})
        for name, (kind, changes) in OF_4.items()
    }
    path = root / "shapes.json"
    path.write_text(json.dumps(shapes))
    return path


def _of_4(tokenizer: Path, to: Path) -> Path:
    """Return the tokenizer as version 4 would have saved it."""
    to.mkdir()
    for path in tokenizer.iterdir():
        (to / path.name).write_bytes(path.read_bytes())
    config = json.loads((to / "tokenizer_config.json").read_text())
    extra = config.pop("extra_special_tokens")
    config = {k: v for k, v in config.items() if k not in ("backend", "is_local")}
    config |= {"tokenizer_class": "PreTrainedTokenizerFast", "additional_special_tokens": extra}
    (to / "tokenizer_config.json").write_text(json.dumps(config))
    return to


@pytest.fixture(scope="module")
def read_by_4(saved: Trained, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    root = tmp_path_factory.mktemp("read")
    (root / "folders.json").write_text(json.dumps([str(path) for path in saved.values()]))
    python4("read", root / "folders.json", root / "out.pt")
    found = torch.load(root / "out.pt")
    return {name: found[str(path)] for name, path in saved.items()}


@pytest.mark.parametrize(
    "name", [*(f"4-{n}" for n in OF_4), *(f"5-{n}" for n in OF_5), "4-llama-bf16", "adapter"]
)
def test_a_trained_model_computes_the_same_in_4_and_in_5(
    name: str, saved: Trained, read_by_4: dict[str, Any]
) -> None:
    found = read_by_4[name]
    assert "error" not in found, found["error"]
    model = loaded(str(saved[name])).eval()
    tokenizer = AutoTokenizer.from_pretrained(saved[name])
    with torch.no_grad():
        logits = model(IDS).logits
    limit = 0.02 if model.dtype == torch.bfloat16 else 1e-5
    assert float((logits - found["logits"]).abs().max()) <= limit * float(logits.abs().max())
    assert found["dtype"] == str(model.dtype)
    assert found["dtype"] == ("torch.bfloat16" if name.endswith("bf16") else "torch.float32")
    assert found["tokens"] == tokenizer(TEXT)["input_ids"]
    turn = [{"role": "user", "content": TEXT}]
    assert found["turn"] == tokenizer.apply_chat_template(turn, tokenize=False)
    assert found["ends"] == [0, 3]
    assert {"<|tool|>", "<|end|>"} <= set(found["specials"])


def test_another_rotary_base_would_be_noticed(
    saved: Trained, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """The comparison above can fail: without version 4's words its logits are others."""
    root = tmp_path_factory.mktemp("broken")
    folder = root / "model"
    folder.mkdir()
    for path in saved["5-llama-plain"].iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    config = json.loads((folder / "config.json").read_text())
    del config["rope_theta"]
    (folder / "config.json").write_text(json.dumps(config))
    (root / "folders.json").write_text(json.dumps([str(folder)]))
    python4("read", root / "folders.json", root / "out.pt")
    logits = torch.load(root / "out.pt")[str(folder)]["logits"]
    model: Callable[..., Any] = AutoModelForCausalLM.from_pretrained(folder).eval()
    with torch.no_grad():
        assert float((model(IDS).logits - logits).abs().max()) > 1e-3
