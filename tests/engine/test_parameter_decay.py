"""Which parameters AdamW decays."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from transformers import AutoModelForCausalLM

from fluxtrain.methods.optimizer import parameter_groups


def test_each_parameter_is_decayed_as_its_kind_says(model_folder: Callable[..., Path]) -> None:
    model = AutoModelForCausalLM.from_pretrained(model_folder("gpt2"))
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    groups = parameter_groups(
        model, learning_rate=1.0, weight_decay=0.1, no_decay=("norms", "biases", "embeddings")
    )
    decayed, spared = ({names[id(p)] for p in group["params"]} for group in groups)
    assert [group["weight_decay"] for group in groups] == [0.1, 0.0]
    assert decayed | spared == set(names.values())
    assert not decayed & spared
    assert {n for n in spared if "weight" in n and "ln_" not in n} == {
        "transformer.wte.weight",
        "transformer.wpe.weight",
    }
    assert all(name.endswith("weight") for name in decayed)
    only_biases = parameter_groups(model, learning_rate=1.0, weight_decay=0.1, no_decay=["biases"])
    assert "transformer.ln_f.weight" in {names[id(p)] for p in only_biases[0]["params"]}
