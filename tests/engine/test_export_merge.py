"""Merged models equal what peft's own merge makes of the whole model in memory, bit for bit."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer

from fluxtrain.core.quantization import reference
from fluxtrain.core.quantization.layout import PackedLayout
from fluxtrain.errors import BadInput
from fluxtrain.plan import states
from fluxtrain.results.export import merging
from fluxtrain.results.export.base_files import dequantised
from tests.engine.adapter_folders import exported, make_adapter

Folder = Callable[..., Path]
VARIANTS: dict[str, dict[str, Any]] = {
    "lora": {},
    "rslora": {"use_rslora": True},
    "dora": {"use_dora": True},
    "patterns": {"rank_pattern": {"q_proj": 2}, "alpha_pattern": {"v_proj": 32}},
    "biases": {"bias": "all"},
    "tokens": {"trainable_token_indices": [1, 2]},
}


def merged_by_peft(base: Path, adapter: Path, *, untied: bool = False) -> Any:
    """peft's merge of the whole model, in fp32."""
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    if untied:
        model.config.tie_word_embeddings = False
        head = model.get_output_embeddings()
        head.weight = nn.Parameter(head.weight.detach().clone())
    return PeftModel.from_pretrained(model, str(adapter)).merge_and_unload(safe_merge=True)


def check_equal(folder: str, expected: Any) -> Any:
    """Compare a folder's model with `expected` rounded to its dtype; return it."""
    found = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    weights = found.state_dict()
    for name, weight in expected.state_dict().items():
        assert torch.equal(weights[name], weight.to(weights[name].dtype)), name
    return found


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("family", ["llama", "qwen2", "gpt2"])
@pytest.mark.thinned(7)
def test_each_variant_equals_pefts_merge(
    family: str, variant: str, model_folder: Folder, tmp_path: Path
) -> None:
    base = model_folder(family, torch.bfloat16)
    adapter = make_adapter(base, tmp_path / "adapter", **VARIANTS[variant])
    answer = exported(adapter)
    found = check_equal(answer.folder, merged_by_peft(base, adapter))
    assert found.dtype == torch.bfloat16
    assert answer.layers is not None and answer.layers.kept == pytest.approx(1, abs=0.01)
    assert answer.logits is not None and answer.logits.mean_kl < answer.logits.kl_limit


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
def test_weights_are_written_in_the_dtype_that_was_asked_for(
    dtype: str, model_folder: Folder, tmp_path: Path
) -> None:
    base = model_folder("llama", torch.float32)
    adapter = make_adapter(base, tmp_path / "adapter", fp32=True)
    answer = exported(adapter, dtype=dtype)
    found = check_equal(answer.folder, merged_by_peft(base, adapter))
    assert f"torch.{answer.dtype}" == str(found.dtype)
    assert {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}[dtype] == answer.dtype
    assert json.loads(Path(answer.folder, "config.json").read_text())["dtype"] == answer.dtype


@pytest.mark.parametrize(
    "settings",
    [
        {"target_modules": ["embed_tokens", "q_proj", "lm_head"]},
        {"target_modules": ["embed_tokens", "q_proj"]},
        {"modules_to_save": ["lm_head"]},
    ],
    ids=["both", "embedding", "saved head"],
)
def test_tied_weights_part_where_the_adapter_changes_them_apart(
    settings: dict[str, Any], model_folder: Folder, tmp_path: Path
) -> None:
    base = model_folder("qwen2", torch.float32)
    adapter = make_adapter(base, tmp_path / "adapter", **settings)
    answer = exported(adapter)
    found = check_equal(answer.folder, merged_by_peft(base, adapter, untied=True))
    assert not found.config.tie_word_embeddings
    embedding, head = found.get_input_embeddings(), found.get_output_embeddings()
    assert not torch.equal(embedding.weight, head.weight)


def test_everything_else_of_the_base_is_carried_over(model_folder: Folder, tmp_path: Path) -> None:
    base = model_folder("llama")
    (base / "LICENSE").write_text("as it was")
    (base / "training.bin").write_bytes(b"not this")
    adapter = make_adapter(base, tmp_path / "adapter")
    (adapter / "chat_template.jinja").write_text("{{ messages[0].content }}")
    folder = Path(exported(adapter).folder)
    names = {path.name for path in folder.iterdir()}
    assert {"generation_config.json", "tokenizer.json", "LICENSE", "config.json"} <= names
    assert not names & {"training.bin", "adapter_config.json", "adapter_model.safetensors"}
    assert (folder / "LICENSE").read_text() == "as it was"
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.chat_template == "{{ messages[0].content }}"
    ours, theirs = (json.loads((place / "config.json").read_text()) for place in (folder, base))
    spelt = {"rope_theta": 10000.0, "rope_scaling": None, "torch_dtype": "float32"}
    assert ours == theirs | spelt  # beside the names of transformers 5


def test_an_index_names_the_shard_of_each_tensor(
    model_folder: Folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = model_folder("llama")
    monkeypatch.setattr(merging, "SHARD_BYTES", 20_000)
    folder = Path(exported(make_adapter(base, tmp_path / "adapter")).folder)
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    shards = {name: load_file(folder / name) for name in set(index["weight_map"].values())}
    assert len(shards) > 3 and all(n.endswith(f"-of-{len(shards):05}.safetensors") for n in shards)
    for tensor, name in index["weight_map"].items():
        assert tensor in shards[name]
    total = sum(t.nbytes for tensors in shards.values() for t in tensors.values())
    assert index["metadata"]["total_size"] == total
    whole = (sum(t.nbytes for t in tensors.values()) for tensors in shards.values())
    assert max(whole) <= 20_000 or any(len(tensors) == 1 for tensors in shards.values())


@pytest.mark.parametrize("storage", ["nf4", "nf4-double", "int8"])
def test_of_a_packed_base_the_unpacked_weights_are_merged_and_written(
    storage: Any, model_folder: Folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(states, "LEAST_PACKED", 1024)
    base = model_folder("llama", torch.bfloat16)
    adapter = make_adapter(base, tmp_path / "adapter", target_modules=["q_proj", "down_proj"])
    answer = exported(adapter, packed=storage)
    assert answer.onto == f"dequantised ({storage})"
    plain = load_file(base / "model.safetensors")
    found = load_file(Path(answer.folder, "model.safetensors"))
    packed = {n for n, t in plain.items() if ".layers." in n and t.numel() >= 1024}
    assert any("up_proj" in name for name in packed), "packed, and not adapted"
    for name, weight in plain.items():
        expected = by_the_oracle(weight, storage) if name in packed else weight
        if not name.endswith(("q_proj.weight", "down_proj.weight")):
            assert torch.equal(found[name], expected), name
        plain[name] = expected
    from safetensors.torch import save_file

    save_file(plain, base / "model.safetensors", metadata={"format": "pt"})
    check_equal(answer.folder, merged_by_peft(base, adapter))


def by_the_oracle(weight: torch.Tensor, storage: Any) -> torch.Tensor:
    layout = PackedLayout.of(storage, [weight.shape])
    packed = torch.zeros(layout.size_bytes, dtype=torch.uint8)
    reference.pack(layout, 0, weight, packed)
    dense = torch.empty(layout.elements, dtype=weight.dtype)
    reference.unpack(layout, packed, dense)
    assert torch.equal(
        dequantised(weight, storage, "w"), dense[: weight.numel()].view(weight.shape)
    )
    return dense[: weight.numel()].view(weight.shape)


def test_onto_the_original_is_told_beside_what_was_trained(
    model_folder: Folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(states, "LEAST_PACKED", 1024)
    base = model_folder("llama", torch.bfloat16)
    adapter = make_adapter(base, tmp_path / "adapter")
    answer = exported(adapter, packed="nf4", onto="original")
    check_equal(answer.folder, merged_by_peft(base, adapter))
    assert answer.quantisation is not None and answer.logits is not None
    assert answer.quantisation.mean_kl > 10 * answer.logits.mean_kl
    assert "something else than was trained" in answer.notes[0]


def test_a_weight_that_fp16_has_no_room_for_is_told(model_folder: Folder, tmp_path: Path) -> None:
    from safetensors.torch import save_file

    base = model_folder("llama", torch.bfloat16)
    path = base / "model.safetensors"
    tensors = load_file(path)
    tensors["model.norm.weight"][3] = 1e5
    save_file(tensors, path, metadata={"format": "pt"})
    adapter = make_adapter(base, tmp_path / "adapter")
    with pytest.raises(BadInput, match=r"model.norm.weight holds 9.98e\+04, and float16"):
        exported(adapter, dtype="fp16")
    assert not (tmp_path / "adapter-merged").exists()


def test_one_weight_is_in_memory_at_a_time(
    model_folder: Folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tensors that were made and are still alive when the next one is made."""
    import weakref

    alive: list[weakref.ref[torch.Tensor]] = []
    most = 0
    weight = merging.Merge.weight

    def counted(self: Any, tensor: Any, parameter: str) -> torch.Tensor:
        nonlocal most
        most = max(most, sum(ref() is not None for ref in alive))
        made = weight(self, tensor, parameter)
        alive.append(weakref.ref(made))
        return made

    monkeypatch.setattr(merging.Merge, "weight", counted)
    base = model_folder("llama", torch.bfloat16)
    exported(make_adapter(base, tmp_path / "adapter"), check=False)
    assert len(alive) > 15 and most == 0


def mixtral_folder(tokenizer: Path, to: Path) -> Path:
    """A model whose experts are one tensor each in its files, and one for all when it is loaded."""
    import shutil

    from transformers import MixtralConfig, MixtralForCausalLM

    shutil.copytree(tokenizer, to)
    torch.manual_seed(2)
    config = MixtralConfig(
        vocab_size=320, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, num_local_experts=4,
        max_position_embeddings=128, bos_token_id=None, eos_token_id=0, pad_token_id=0,
    )  # fmt: skip
    MixtralForCausalLM(config).save_pretrained(to)
    assert any("experts.3." in name for name in load_file(to / "model.safetensors"))
    return to


def test_experts_that_no_adapter_changes_are_carried_over_as_they_are(
    tokenizer_folder: Path, tmp_path: Path
) -> None:
    base = mixtral_folder(tokenizer_folder, tmp_path / "base")
    adapter = make_adapter(base, tmp_path / "adapter", target_modules=["q_proj", "o_proj"])
    answer = exported(adapter)
    check_equal(answer.folder, merged_by_peft(base, adapter))
    ours, theirs = (load_file(f / "model.safetensors") for f in (Path(answer.folder), base))
    assert ours.keys() == theirs.keys()
    experts = [name for name in ours if ".experts." in name]
    assert experts and all(torch.equal(ours[name], theirs[name]) for name in experts)


def test_experts_that_training_packed_as_one_are_not_packed_one_by_one(
    tokenizer_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(states, "LEAST_PACKED", 1024)
    base = mixtral_folder(tokenizer_folder, tmp_path / "base")
    adapter = make_adapter(base, tmp_path / "adapter", target_modules=["q_proj", "o_proj"])
    with pytest.raises(BadInput, match=r"training packed .*experts.* as one.*--onto original"):
        exported(adapter, packed="nf4-double")
    assert exported(adapter, packed="nf4-double", onto="original").kind == "merged"
