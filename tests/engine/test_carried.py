"""What a checkpoint holds beside its text model is there in what is trained from it, and read."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers.models.qwen3_5 import Qwen3_5Config, Qwen3_5ForConditionalGeneration

from fluxtrain.data.rendering.named import use_template
from fluxtrain.methods.method import METHODS
from fluxtrain.models.loading import LoadedModel, ModelSource, load_model
from fluxtrain.train.inputs import told_of_folder
from tests.engine.adapter_folders import exported, make_adapter

Folder = Callable[..., Path]
TEXT: dict[str, Any] = {
    "vocab_size": 320, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
    "pad_token_id": 0,
}  # fmt: skip


def with_pictures() -> PreTrainedModel:
    """A model of text and pictures, as Qwen3.5 is published."""
    linear = dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim"), 8)
    heads = {"linear_num_key_heads": 2, "linear_num_value_heads": 4}
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 0]}
    layers = ["linear_attention", "full_attention"]
    text = {"layer_types": layers, "head_dim": 8, "rope_parameters": rope} | linear | heads
    vision = {
        "hidden_size": 16, "intermediate_size": 16, "depth": 1, "num_heads": 2, "patch_size": 14,
        "out_hidden_size": 32, "deepstack_visual_indexes": [],
    }  # fmt: skip
    return Qwen3_5ForConditionalGeneration(
        Qwen3_5Config(text_config=TEXT | text, vision_config=vision)  # type: ignore[arg-type]
    )


def with_further_layer() -> PreTrainedModel:
    """A model whose files hold a layer for the next token but one, as DeepSeek-V3's do."""
    more = {
        "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1,
        "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8, "num_key_value_heads": 4,
        "q_lora_rank": 8, "kv_lora_rank": 8, "moe_intermediate_size": 8, "first_k_dense_replace": 1,
    }  # fmt: skip
    shape = AutoConfig.for_model("deepseek_v3", **TEXT | more)
    return AutoModelForCausalLM.from_config(shape)  # type: ignore[no-any-return]


def weights(folder: Path) -> dict[str, Tensor]:
    return {n: t for path in folder.glob("*.safetensors") for n, t in load_file(path).items()}


def checkpoint(folder: Path, model: PreTrainedModel, **more: Tensor) -> dict[str, Tensor]:
    """Replace the model of a folder by another and further tensors; return all tensors."""
    model.save_pretrained(folder)
    stored = weights(folder) | more
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    return stored


def loaded(folder: Path) -> LoadedModel:
    return load_model(ModelSource(path=str(folder)))


def saved(model: LoadedModel, to: Path) -> Path:
    METHODS["full"].try_saving(model, to.parent)
    METHODS["full"].save(model, None, to)  # type: ignore[arg-type]
    return to


@pytest.mark.parametrize("kind", [with_pictures, with_further_layer])
@pytest.mark.parametrize("way", ["saved", "merged"])
def test_tensors_beside_the_text_model_are_saved_under_their_names(
    kind: Callable[[], PreTrainedModel], way: str, model_folder: Folder, tmp_path: Path
) -> None:
    folder = model_folder("llama")
    further = {"mtp.norm.weight": torch.randn(4), "model.layers.2.eh_proj.weight": torch.randn(3)}
    stored = checkpoint(folder, kind(), **further)
    if way == "merged":
        adapter = make_adapter(folder, tmp_path / "adapter", target_modules=["o_proj"])
        made = Path(exported(adapter, check=False).folder)
    else:
        model = loaded(folder)
        assert not told_of_folder(model, whole=True)
        has_parts = model.beside.json("config.json")["model_type"] == "qwen3_5"  # type: ignore[index]
        assert ["export --merge" in line for line in told_of_folder(model, whole=False)] == (
            [True] if has_parts else []
        )
        with torch.no_grad():
            model.model.get_output_embeddings().weight.add_(1)
        made = saved(model, tmp_path / "made")
    found = weights(made)
    assert found.keys() == stored.keys()
    changed = {name for name in stored if not torch.equal(stored[name], found[name])}
    assert changed
    assert all("o_proj" in name or name == "lm_head.weight" for name in changed)
    before, after = (json.loads((f / "config.json").read_text()) for f in (folder, made))
    assert after["architectures"] == before["architectures"]
    assert after["model_type"] == before["model_type"]
    _, told = type(kind()).from_pretrained(made, output_loading_info=True)
    assert not told["missing_keys"] and not told["mismatched_keys"]
    assert loaded(made).model is not None


def test_tensors_that_cannot_be_carried_are_told_before_the_first_step(
    model_folder: Folder, tmp_path: Path
) -> None:
    """The model is saved under other names than the files have: no class reads both."""
    folder = model_folder("llama")
    own = {n.removeprefix("model."): t for n, t in weights(folder).items()}
    own["value_head.weight"] = torch.zeros(3)
    save_file(own, folder / "model.safetensors", metadata={"format": "pt"})
    model = loaded(folder)
    (line,) = told_of_folder(model, whole=True)
    assert "value_head.weight" in line and "method.name=lora" in line
    assert told_of_folder(model, whole=False) == []
    assert "value_head.weight" not in weights(saved(model, tmp_path / "made"))


@pytest.mark.parametrize("way", ["saved", "merged"])
def test_matrices_said_to_be_one_that_differ_are_told_and_saved_as_two(
    way: str, model_folder: Folder, tmp_path: Path
) -> None:
    folder = model_folder("llama")
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"tie_word_embeddings": True}))
    before = weights(folder)
    assert not torch.equal(before["lm_head.weight"], before["model.embed_tokens.weight"])
    model = loaded(folder)
    assert "tie_word_embeddings" in told_of_folder(model, whole=False)[0]
    if way == "merged":
        made = Path(exported(make_adapter(folder, tmp_path / "adapter"), check=False).folder)
    else:
        made = saved(model, tmp_path / "made")
    assert json.loads((made / "config.json").read_text())["tie_word_embeddings"] is False
    for name in ("lm_head.weight", "model.embed_tokens.weight"):
        assert torch.equal(weights(made)[name], before[name])
    assert not told_of_folder(loaded(made), whole=True)


@pytest.mark.parametrize("chosen", ["auto", "own.jinja"])
def test_all_templates_of_a_tokenizer_are_carried_unless_another_is_chosen(
    chosen: str, model_folder: Folder, tmp_path: Path
) -> None:
    folder = model_folder("llama")
    words = AutoTokenizer.from_pretrained(folder)
    words.chat_template = {"default": "{{ messages[0]['content'] }}", "rag": "{{ documents }}"}
    words.save_pretrained(folder)
    assert (folder / "additional_chat_templates" / "rag.jinja").exists()
    model = loaded(folder)
    if chosen != "auto":
        chosen = str(tmp_path / chosen)
        Path(chosen).write_text("{{ messages[-1]['content'] }}")
    use_template(model.tokenizer, chosen)  # type: ignore[arg-type]
    made = [saved(model, tmp_path / "made")]
    adapter = make_adapter(folder, tmp_path / "adapter")
    METHODS["lora"].try_saving(model, tmp_path)
    from fluxtrain.models.beside import write_adapter_files

    write_adapter_files(adapter, model.model, model.tokenizer, model.beside)
    made += [Path(exported(adapter, merge=merge, check=False).folder) for merge in (True, False)]
    for one in made:
        assert AutoTokenizer.from_pretrained(one).chat_template == model.tokenizer.chat_template
