"""YAML is read as it looks: nothing that is written is silently taken for another value."""

from __future__ import annotations

import time
from typing import Any

import pytest
import yaml

from fluxtrain.config.loader import Loader
from fluxtrain.config.schema import RunConfig, demo_config, validate
from fluxtrain.config.text import parse_yaml
from fluxtrain.errors import BadInput


def read(text: str) -> RunConfig:
    return validate(parse_yaml(text, "run.yaml"), "run.yaml")


def refusal(text: str) -> str:
    with pytest.raises(BadInput) as caught:
        read(text)
    return str(caught.value)


@pytest.mark.parametrize(
    ("written", "value", "cure"),
    [("010", "8", "10"), ("+010", "8", "+10"), ("-010", "-8", "-10"), ("0_10", "8", "10")],
)
@pytest.mark.parametrize(
    "key", ["train.steps", "train.learning_rate", "placement.prefetch", "model.revision"]
)
def test_a_number_that_yaml_counts_in_eights_is_refused(
    key: str, written: str, value: str, cure: str
) -> None:
    section, _, name = key.partition(".")
    told = f"'{written}' is {value} in YAML, which counts in eights behind a zero: write {cure}, or"
    assert refusal(f"{section}:\n  {name}: {written}\n").startswith(f"run.yaml line 2: {told}")
    with pytest.raises(BadInput) as caught:
        demo_config([f"{key}={written}"])
    assert str(caught.value).startswith(f"--set {key}: {told}")


@pytest.mark.parametrize(("written", "value"), [("1:30", "90"), ("1:00:00.5", "3600.5")])
def test_a_number_that_yaml_counts_in_sixties_is_refused(written: str, value: str) -> None:
    told = f"'{written}' is {value} in YAML, which counts in sixties behind a colon: write the num"
    assert refusal(f"train: {{steps: {written}}}").startswith(f"run.yaml line 1: {told}")


def test_numbers_within_lists_are_looked_at_too() -> None:
    assert "write 1, or quote it" in refusal("parallel: {cards: [0, 01]}")


@pytest.mark.parametrize(
    ("written", "steps"),
    [("0x10", 16), ("0b10", 2), ("1_000", 1000), ("20", 20), ("1.0", 1), ("'010'", 10)],
)
def test_numbers_that_mean_one_thing_are_read(written: str, steps: int) -> None:
    assert read(f"train: {{steps: {written}}}").train.steps == steps


def test_zero_and_the_new_spelling_of_eights_are_no_surprise() -> None:
    assert read("train: {seed: 0, weight_decay: 00.5}").train.weight_decay == 0.5
    assert "'0o10'" in refusal("train: {steps: 0o10}")


@pytest.mark.parametrize("word", ["on", "off", "yes", "no", "Yes", "NO", "y", "n", "2024-01-01"])
def test_a_word_stays_text_where_text_is_meant(word: str) -> None:
    config = read(f"model: {{path: {word}}}\ndata: {{columns: {{text: {word}}}}}")
    assert config.model.path == config.data.columns["text"] == word
    assert read(f"data: {{columns: {{{word}: text}}}}").data.columns == {word: "text"}


@pytest.mark.parametrize(
    ("word", "switched"),
    [("on", True), ("yes", True), ("True", True), ("off", False), ("no", False), ("False", False)],
)
def test_a_word_for_yes_or_no_switches_what_can_be_switched(word: str, switched: bool) -> None:
    assert read(f"trackers: {{offline: {word}}}").trackers.offline is switched
    assert f"'{word}'" in refusal(f"train: {{steps: '{word}'}}")


@pytest.mark.parametrize("value", ["on", "010", "1:30", "0o10", "true", "2024-01-01", "<<", "1_0"])
def test_what_the_wizard_writes_is_read_as_it_was(value: str) -> None:
    tree = {"model": {"path": value}, "data": {"columns": {value: value}}}
    assert parse_yaml(yaml.safe_dump(tree), "it") == tree


def test_a_merge_brings_in_what_is_not_given() -> None:
    text = "a: &a {steps: 3, seed: 1}\ntrain:\n  seed: 2\n  <<: *a\n  accumulation: 4\n"
    assert parse_yaml(text, "it")["train"] == {"steps": 3, "seed": 2, "accumulation": 4}
    several = "a: &a {b: 1}\nc: &c {b: 2, d: 3}\ne: {<<: [*a, *c]}\n"
    assert parse_yaml(several, "it")["e"] == {"b": 1, "d": 3}
    nested = "a: &a {b: 1}\nc: &c {<<: *a, b: 2}\nd: {<<: *c, b: 3}\nf: {<<: *c}\n"
    assert parse_yaml(nested, "it")["d"] == {"b": 3}
    assert parse_yaml(nested, "it")["f"] == parse_yaml(nested, "it")["c"] == {"b": 2}
    assert demo_config(["train={<<: {steps: 3}, seed: 1}"]).train.steps == 3


def test_a_key_that_is_written_twice_is_refused_beside_a_merge_too() -> None:
    text = "a: &a {steps: 3}\ntrain: {<<: *a, steps: 1, steps: 2}\n"
    assert "line 2: not valid YAML: the key 'steps' is given twice" in refusal(text)


@pytest.mark.parametrize("value", ["5", "[5]", "text"])
def test_a_merge_of_what_is_no_mapping_is_refused(value: str) -> None:
    assert "expected a mapping" in refusal(f"train: {{<<: {value}}}")


def doubling() -> str:
    return "a0: &a0 {b: 1}\n" + "".join(f"a{i + 1}: &a{i + 1} {{<<: [*a{i}, *a{i}]}}\n"
                                        for i in range(60))  # fmt: skip


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (doubling(), "brings in more than 10,000 keys"),
        ("a: &a {<<: *a}", "nested too deeply"),
    ],
)
def test_merges_without_an_end_are_refused_at_once(text: str, told: str) -> None:
    began_s = time.monotonic()
    assert told in refusal(text)
    assert time.monotonic() - began_s < 5


def test_no_other_value_of_yaml_changes() -> None:
    for text in ("[1, -2, +3, 0, 0.5, .inf, 1.5e+3, ~, null, 'a', a b, {a: b}, true, False]",):
        found: Any = yaml.load(text, Loader=Loader)
        assert found == yaml.safe_load(text)
