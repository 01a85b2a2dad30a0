"""A tokenizer and texts for tests of kept tokens, and shards that hold few of them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerBase

from fluxtrain.data.store import shards
from tests.engine.mask_grounds import TEMPLATES, tokenizer_of


def keep_small(monkeypatch: pytest.MonkeyPatch, shard_tokens: int = 2048) -> None:
    """Let a shard hold so many tokens, and a batch of texts few characters."""
    monkeypatch.setattr(shards, "SHARD_TOKENS", shard_tokens)
    monkeypatch.setattr("fluxtrain.data.encoding.encode.BATCH_CHARACTERS", 2048)


def byte_level() -> PreTrainedTokenizerBase:
    return tokenizer_of("byte-level", TEMPLATES["chatml"])


def texts(folder: Path) -> Path:
    """Write 400 texts of some words."""
    path = folder / "texts.jsonl"
    lines = (f"the river runs past an old mill {number}" for number in range(400))
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in lines))
    return path
