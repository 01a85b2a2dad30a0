"""Special tokens that frozen embeddings cannot learn are told before the first step."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

from fluxtrain.config.schema import load_config
from fluxtrain.train.inputs import load_inputs, told_of

ENDS = ["<|im_start|>", "<|im_end|>"]


@pytest.mark.parametrize("rows", ["zeros", "equal", "trained"])
@pytest.mark.parametrize("matrix", ["model.embed_tokens.weight", "lm_head.weight"])
def test_tokens_of_the_template_that_were_never_trained_are_told_unless_all_is_trained(
    rows: str, matrix: str, model_folder: Callable[..., Path], tmp_path: Path,
    run_config: Callable[..., Path],
) -> None:  # fmt: skip
    folder = model_folder("llama")
    words = AutoTokenizer.from_pretrained(folder)
    words.add_tokens([*ENDS, "<|reserved|>"], special_tokens=True)
    words.save_pretrained(folder)
    path = folder / "config.json"
    size = {"vocab_size": len(words)}
    path.write_text(json.dumps(json.loads(path.read_text()) | size))
    weights = load_file(folder / "model.safetensors")
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        grown = torch.randn(len(words), 32, generator=torch.Generator().manual_seed(3)) * 0.02
        old = weights[name][: len(words)]
        grown[: len(old)] = old
        if name == matrix and rows != "trained":
            grown[words.convert_tokens_to_ids(ENDS)] = 0.0 if rows == "zeros" else 0.02
        weights[name] = grown
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    talk = [{"role": "user", "content": "what is two"}, {"role": "assistant", "content": "four"}]
    data = tmp_path / "chat.jsonl"
    data.write_text((json.dumps({"messages": talk}) + "\n") * 30)
    config = load_config(
        run_config(data__path=str(data), data__chat_template="chatml", method__name="lora"), []
    )
    inputs = load_inputs(config)
    told = [line for line in told_of(inputs, whole=False) if "never trained" in line]
    if rows == "trained":
        assert not told
        return
    (line,) = told
    assert line.startswith("<|im_start|>, <|im_end|>: 2 special tokens")
    assert ("head" if matrix.startswith("lm_head") else "embedding") in line
    assert "<|reserved|>" not in line
    assert "data.chat_template to llama-2 or mistral" in line and "chatml" not in line
    assert not any("never trained" in line for line in told_of(inputs, whole=True))
