"""Run by a Python that has transformers 4: makes model folders there, and reads ours.

python with_4.py make SHAPES.json TOKENIZER   (SHAPES: folder -> class of its configuration, kwargs)
python with_4.py read FOLDERS.json OUT.pt
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

IDS = torch.arange(1, 41).reshape(2, 20) * 7 % 300
TEXT = "The quick brown fox: 1 + 2\n\tüß"


def make(shapes: Path, tokenizer: Path) -> None:
    """Save models with random weights as version 4 does, beside a tokenizer."""
    for folder, (kind, sizes) in json.loads(shapes.read_text()).items():
        config = getattr(transformers, kind)(**sizes)
        torch.manual_seed(5)
        shutil.copytree(tokenizer, folder)
        AutoModelForCausalLM.from_config(config).save_pretrained(folder)
        AutoTokenizer.from_pretrained(folder).save_pretrained(folder)


def loaded(folder: str) -> Any:
    """Load a model, or an adapter with its base."""
    adapter = Path(folder, "adapter_config.json")
    if not adapter.exists():
        return AutoModelForCausalLM.from_pretrained(folder, torch_dtype="auto")
    from peft import PeftModel

    base = json.loads(adapter.read_text())["base_model_name_or_path"]
    model = AutoModelForCausalLM.from_pretrained(base, torch_dtype="auto")
    return PeftModel.from_pretrained(model, folder)


def read(folder: str) -> dict[str, Any]:
    """Return what version 4 makes of a folder."""
    model = loaded(folder).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    with torch.no_grad():
        logits = model(IDS).logits
    turn = [{"role": "user", "content": TEXT}]
    settings = GenerationConfig.from_pretrained(folder)
    return {
        "logits": logits,
        "dtype": str(model.dtype),
        "tokens": tokenizer(TEXT)["input_ids"],
        "turn": tokenizer.apply_chat_template(turn, tokenize=False),
        "ends": settings.eos_token_id,
        "specials": sorted(tokenizer.all_special_tokens),
    }


def told(folder: str) -> dict[str, Any]:
    """Return the same, or why it cannot be read."""
    try:
        return read(folder)
    except Exception as error:  # noqa: BLE001 - whatever it is, the test shows it
        return {"error": f"{type(error).__name__}: {error}"}


if __name__ == "__main__":
    assert transformers.__version__.startswith("4."), transformers.__version__
    if sys.argv[1] == "make":
        make(Path(sys.argv[2]), Path(sys.argv[3]))
    else:
        folders = json.loads(Path(sys.argv[2]).read_text())
        torch.save({folder: told(folder) for folder in folders}, sys.argv[3])
