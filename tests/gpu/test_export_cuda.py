"""Exports are checked on the GPU, with models that stream."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from fluxtrain.errors import Disagrees
from fluxtrain.plan import states
from fluxtrain.results.export import merging
from tests.engine.adapter_folders import exported, make_adapter
from tests.engine.conftest import SENTENCES, VOCABULARY, tiny_model

pytestmark = pytest.mark.gpu


@pytest.fixture
def base(tmp_path: Path) -> Path:
    from fluxtrain.data.demo import train_tokenizer

    train_tokenizer(SENTENCES, tmp_path / "tokenizer", VOCABULARY)
    shutil.copytree(tmp_path / "tokenizer", tmp_path / "base")
    tiny_model("llama", torch.bfloat16).save_pretrained(tmp_path / "base")
    return tmp_path / "base"


@pytest.mark.parametrize("packed", [None, "nf4-double", "int8"])
def test_a_merged_model_agrees_on_the_gpu(
    packed: str | None, base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(states, "LEAST_PACKED", 1024)
    adapter = make_adapter(base, tmp_path / "adapter")
    answer = exported(adapter, packed=packed, device="cuda")
    assert answer.logits is not None and answer.logits.mean_kl < answer.logits.kl_limit


def test_a_wrong_merge_is_refused_on_the_gpu(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weight: Callable[..., torch.Tensor] = merging.Merge.weight
    monkeypatch.setattr(
        merging.Merge, "weight", lambda self, tensor, name: weight(self, tensor, name).roll(1, 0)
    )
    with pytest.raises(Disagrees, match="mean KL"):
        exported(make_adapter(base, tmp_path / "adapter"), device="cuda")
    assert not (tmp_path / "adapter-merged").exists()
