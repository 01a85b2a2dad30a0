"""An adapter of any kind, with any option, computes what peft computes, or is refused with code 2
and the cure: none passes whose answers are the base's."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from peft import PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from fluxtrain.errors import BadInput
from tests.engine.adapter_folders import exported, make_adapter
from tests.engine.test_adapter_configs import edited, refusals
from tests.engine.used_models import opened, plain

LAYERS = ["q_proj", "v_proj", "down_proj"]
IDS = torch.randint(1, 300, (2, 9), generator=torch.Generator().manual_seed(1))
KINDS: dict[str, dict[str, Any]] = {
    "LoHaConfig": {"r": 4},
    "LoKrConfig": {"r": 4},
    "IA3Config": {"feedforward_modules": ["down_proj"]},
    "OFTConfig": {"r": 4, "oft_block_size": 0},
    "OFTConfig by blocks": {"r": 0, "oft_block_size": 8},
    "VeraConfig": {"r": 4},
    "LNTuningConfig": {"target_modules": ["norm"]},
    "TrainableTokensConfig": {"target_modules": ["embed_tokens"], "token_indices": IDS[0].tolist()},
}
OPTIONS: dict[str, dict[str, Any]] = {
    "use_dora": {"use_dora": True},
    "use_rslora": {"use_rslora": True},
    "fan_in_fan_out": {"fan_in_fan_out": True},
    "alpha_pattern": {"alpha_pattern": {"q_proj": 32}},
    "rank_pattern": {"rank_pattern": {"q_proj": 2}},
    "modules_to_save": {"modules_to_save": ["lm_head"]},
    "layers_to_transform": {"layers_to_transform": [0]},
    "trainable_token_indices": {"trainable_token_indices": [int(IDS[0, 0]), int(IDS[1, 2])]},
    "target_modules": {"target_modules": None},  # those that peft has for this kind of model
}


@pytest.fixture
def base(model_folder: Callable[..., Path]) -> Path:
    return model_folder("llama")


def of_kind(name: str, base: Path, to: Path) -> Path:
    """Write an adapter of another kind, with random weights."""
    model = AutoModelForCausalLM.from_pretrained(base, dtype="auto")
    settings = {"target_modules": LAYERS, **KINDS[name]}
    config = getattr(peft, name.partition(" ")[0])(**settings)
    adapted = get_peft_model(model, config, autocast_adapter_dtype=False)
    draw = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in adapted.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn(parameter.shape, generator=draw) * 0.05)
    adapted.save_pretrained(to)
    return to


def assert_applied(base: Path, adapter: Path, merged: Path) -> None:
    """The opened and the merged model compute what peft computes, and not the base."""
    beside: Any = PeftModel.from_pretrained(plain(base), str(adapter), autocast_adapter_dtype=False)
    with torch.no_grad():
        expected, alone = beside.eval()(input_ids=IDS).logits, plain(base)(input_ids=IDS).logits
        with opened(adapter) as found:
            used = found.model(input_ids=IDS, use_cache=False).logits + 0
        exported(adapter, to=merged, device="cpu")
        written = plain(merged)(input_ids=IDS).logits
    assert float((expected - alone).abs().max()) > 1e-3
    torch.testing.assert_close(used, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(written, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.thinned(3)
@pytest.mark.parametrize("name", KINDS)
def test_another_kind_than_lora_is_applied_as_peft_does(
    name: str, base: Path, tmp_path: Path
) -> None:
    assert_applied(base, of_kind(name, base, tmp_path / "adapter"), tmp_path / "merged")


@pytest.mark.thinned(4)
@pytest.mark.parametrize("name", OPTIONS)
def test_an_option_of_lora_is_applied_as_peft_does(name: str, base: Path, tmp_path: Path) -> None:
    settings = {"target_modules": LAYERS, **OPTIONS[name]}
    assert_applied(base, make_adapter(base, tmp_path / "a", **settings), tmp_path / "merged")


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"peft_type": "LOHA"}, r"no layer for \S*lora_A|lacks"),
        ({"peft_type": "SOMETHING"}, "cannot be read by peft"),
        ({"target_modules": None}, r"no layer for \S*lora_A"),
        ({"layers_to_transform": [0]}, r"no layer for \S*layers\.1\.\S*lora_A"),
        ({"modules_to_save": ["lm_head"]}, r"lm_head|lacks"),
        ({"use_dora": True}, "lacks .*lora_magnitude_vector.* and 5 more, which its configuration"),
        ({"use_what_comes_later": True}, "use_what_comes_later is set, an option of LORA that pef"),
    ],
)
def test_a_configuration_that_leaves_tensors_or_options_out_is_refused(
    changes: dict[str, Any], says: str, base: Path, tmp_path: Path
) -> None:
    adapter = make_adapter(base, tmp_path / "adapter", target_modules=LAYERS)
    edited(adapter, **changes)
    for told in refusals(adapter):
        assert re.search(says, told), told


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (
            # its tensors have the rank of all experts together, which no key says
            {"target_parameters": ["experts.gate_up_proj"], "r": 1},
            "target_parameters are set, .*which FluxTrain does not apply: merge it with peft's",
        ),
        (
            {"init_lora_weights": "pissa_niter_4"},
            r"'pissa_niter_4', by which peft rewrites the base: .*path_initial_model_for_w",
        ),
        ({"peft_type": "PROMPT_TUNING", "num_virtual_tokens": 3}, "trained prompts, .* use them"),
        ({"peft_type": "ADALORA", "total_step": 9}, "is ADALORA, .*merge it with peft's merge_and"),
        ({"alora_invocation_tokens": [1]}, "alora_invocation_tokens are set, .*with peft"),
    ],
)
def test_what_no_command_applies_is_refused_by_all_in_the_same_words(
    changes: dict[str, Any], says: str, base: Path, tmp_path: Path
) -> None:
    adapter = make_adapter(base, tmp_path / "adapter", target_modules=LAYERS)
    path = edited(adapter, **changes)
    assert_refused_alike(adapter, rf"^{path}\b.*{says}")


def assert_refused_alike(adapter: Path, says: str) -> None:
    """Opening the adapter and exporting it, alone or merged, say one and the same."""
    with pytest.raises(BadInput) as alone:
        exported(adapter, merge=False)
    exporting, opening = refusals(adapter)
    assert exporting == opening == str(alone.value)
    assert re.search(says, opening), opening


def stored_as(dtype: torch.dtype, adapter: Path, *parts: str) -> Path:
    """Let those of an adapter's tensors that have one of `parts` in their names be of a dtype."""
    path = adapter / "adapter_model.safetensors"
    tensors = load_file(path)
    chosen = {name for name in tensors if any(part in name for part in parts)}
    tensors = {n: t.to(dtype) if n in chosen else t for n, t in tensors.items()}
    save_file(tensors, path, metadata={"format": "pt"})
    return adapter


def test_whole_numbers_are_no_adapter(base: Path, tmp_path: Path) -> None:
    part = "layers.1.self_attn.q_proj.lora_A"
    adapter = stored_as(torch.int8, make_adapter(base, tmp_path / "adapter"), part)
    says = rf"adapter: 1 of the adapter's 28 tensors are I8, first \S*{re.escape(part)}.*save it ag"
    assert_refused_alike(adapter, says)


def test_keys_that_are_missing_are_named(base: Path, tmp_path: Path) -> None:
    path = make_adapter(base, tmp_path / "adapter") / "adapter_config.json"
    content = json.loads(path.read_text())
    path.write_text(json.dumps({key: content[key] for key in ("r", "base_model_name_or_path")}))
    lacking = "peft_type, lora_alpha, target_modules"
    assert_refused_alike(path.parent, f"^{path} lacks {lacking}, which peft's save_pretrained wr")
