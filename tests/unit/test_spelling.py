"""A configuration says the same to transformers 4, to transformers 5 and to vLLM."""

from __future__ import annotations

from typing import Any

import pytest

from fluxtrain.models.spelling import model_in_both, tokenizer_in_both

PLAIN = {"rope_type": "default", "rope_theta": 3e5}
SCALED = {"rope_type": "llama3", "factor": 8.0, "rope_theta": 5e5}
OLD = {
    "model_type": "llama",
    "rope_theta": 500000.0,
    "rope_scaling": {"type": "linear", "factor": 2},
}


def as_vllm_reads(config: dict[str, Any]) -> dict[str, Any]:
    """Return the rotary parameters that vLLM computes with beside transformers 4: those of
    `rope_scaling` if there is one, else `rope_parameters`, and base and share of older names over
    them."""
    found = dict(config.get("rope_scaling") or config.get("rope_parameters") or {})
    if not found:
        found = {"rope_type": "default"}
    for name, names in {
        "rope_theta": ("rope_theta", "rotary_emb_base"),
        "partial_rotary_factor": ("partial_rotary_factor", "rotary_pct"),
    }.items():
        value = next((config[one] for one in names if config.get(one) is not None), None)
        if value is not None:
            found[name] = value
    return found


@pytest.mark.parametrize("parameters", [PLAIN, SCALED, {**PLAIN, "partial_rotary_factor": 0.5}])
@pytest.mark.parametrize("kind", ["llama", "gpt_neox"])
def test_what_version_5_wrote_is_said_to_version_4_and_vllm_too(
    kind: str, parameters: dict[str, Any]
) -> None:
    config = {"model_type": kind, "rope_parameters": parameters, "dtype": "bfloat16"}
    made = model_in_both(config, config, "bfloat16")
    assert as_vllm_reads(made) == parameters
    assert made["rope_parameters"] == parameters
    assert (made["rope_scaling"] is None) == (parameters["rope_type"] == "default")
    assert (
        made["rotary_emb_base" if kind == "gpt_neox" else "rope_theta"] == parameters["rope_theta"]
    )
    assert made["dtype"] == made["torch_dtype"] == "bfloat16"


def test_what_version_4_wrote_stays_and_version_5_is_told_too() -> None:
    known = {"rope_parameters": {"rope_type": "linear", "factor": 2, "rope_theta": 500000.0}}
    made = model_in_both({**OLD, "torch_dtype": "float32"}, known, "bfloat16")
    assert made["rope_scaling"] == OLD["rope_scaling"] and made["rope_theta"] == 500000.0
    assert made["rope_parameters"] == known["rope_parameters"]
    assert made["dtype"] == made["torch_dtype"] == "bfloat16"
    assert model_in_both(made, known, "bfloat16") == made, "twice is once"


def test_a_base_that_the_source_leaves_to_its_class_is_written_out() -> None:
    """The classes of the two versions need not agree on it."""
    made = model_in_both({"model_type": "qwen3"}, {"rope_parameters": PLAIN}, "float32")
    assert made["rope_theta"] == 3e5 and made["rope_scaling"] is None


def test_kinds_of_layers_have_bases_of_their_own() -> None:
    parameters = {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    }
    config = {"model_type": "gemma3_text", "rope_parameters": parameters}
    made = model_in_both(config, config, "float32")
    assert (made["rope_theta"], made["rope_local_base_freq"]) == (1e6, 1e4)
    assert made["rope_scaling"] == {"rope_type": "linear", "factor": 8.0}
    old = {"model_type": "gemma3_text", "rope_theta": 1e6, "rope_local_base_freq": 1e4}
    known = {"rope_parameters": parameters}
    assert "rope_parameters" not in model_in_both(old, known, "float32")


def test_where_windows_are_is_said_in_the_words_of_earlier_versions_too() -> None:
    kinds = ["sliding_attention", "sliding_attention", "full_attention"]
    for layer_types, every in (([*kinds, *kinds, kinds[0]], 3), ([*kinds, kinds[2]], None)):
        config = {"model_type": "gemma3_text", "layer_types": layer_types}
        assert model_in_both(config, {}, "float32").get("sliding_window_pattern") == every
    assert "sliding_window_pattern" not in model_in_both({"model_type": "qwen3"}, {}, "float32")


def test_the_text_part_of_a_larger_model_is_spelt_in_both_ways_too() -> None:
    text = {"model_type": "llama", "rope_parameters": SCALED, "torch_dtype": "float32"}
    config = {"model_type": "llava", "text_config": text, "vision_config": {"hidden_size": 8}}
    made = model_in_both(config, config, "bfloat16")
    assert made["text_config"]["rope_theta"] == 5e5
    assert made["text_config"]["dtype"] == made["text_config"]["torch_dtype"] == "bfloat16"
    assert made["vision_config"] == {"hidden_size": 8}


def test_a_model_without_rotary_embeddings_gets_none() -> None:
    made = model_in_both({"model_type": "gpt2"}, {"model_type": "gpt2"}, "float32")
    assert made == {"model_type": "gpt2", "dtype": "float32", "torch_dtype": "float32"}


def test_the_number_of_experts_has_its_older_name() -> None:
    made = model_in_both({"model_type": "qwen3_moe", "num_local_experts": 8}, {}, "float32")
    assert made["num_experts"] == made["num_local_experts"] == 8


def test_a_tokenizer_names_a_class_that_both_versions_have() -> None:
    of_5 = {
        "tokenizer_class": "TokenizersBackend",
        "extra_special_tokens": ["<a>"],
        "is_local": True,
        "local_files_only": True,
    }
    made = tokenizer_in_both(of_5)
    assert made == {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "additional_special_tokens": ["<a>"],
    }
    named = {"tokenizer_class": "Qwen2Tokenizer", "extra_special_tokens": {"image": "<img>"}}
    assert tokenizer_in_both(named) == named
