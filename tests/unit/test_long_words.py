"""What a message quotes is short: long paths and settings are cut in the middle."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest

from fluxtrain import errors
from fluxtrain.commands.output import tell
from fluxtrain.commands.paths import refuse_missing_paths
from fluxtrain.config.schema import demo_config, validate
from fluxtrain.errors import BadInput, brief, readable

LONG = "A" + "x" * 100_000 + "Z"
WORDS = "A" + "word " * 20_000 + "Z"
MOST = 1500  # characters of a message that quotes one value

KINDS = [
    kind
    for _, kind in inspect.getmembers(errors, inspect.isclass)
    if issubclass(kind, errors.FluxTrainError) and kind not in (errors.Interrupted, errors.TooNew)
]


@pytest.mark.parametrize("kind", KINDS)
def test_every_error_says_the_two_ends_of_what_is_long(kind: type[errors.FluxTrainError]) -> None:
    told = str(kind(f"{LONG} is there: name another"))
    assert told.startswith("Axx") and "xxZ is there: name another" in told
    assert len(told) < 400
    told = str(kind(f"{WORDS} is there: name another"))
    assert told.startswith("Aword") and told.endswith("Z is there: name another")
    assert len(told) <= errors.LONGEST_MESSAGE


def test_what_can_be_read_is_left_as_it_is() -> None:
    path = "/".join(["folder"] * 60)
    assert readable(f"{path} does not exist") == f"{path} does not exist"
    assert brief("x" * 300) == "x" * 300
    assert len(brief("x" * 301)) <= 300


def test_the_command_that_goes_on_is_whole() -> None:
    command = f"fluxtrain train --resume /{'a/' * 1500}"
    assert str(errors.Interrupted(command)) == command


@pytest.mark.parametrize("key", ["data.path", "model.path", "samples.prompts"])
@pytest.mark.parametrize("value", [LONG, WORDS])
def test_a_path_of_any_length_that_is_missing_is_named_by_its_ends(key: str, value: str) -> None:
    section, _, name = key.partition(".")
    with pytest.raises(BadInput) as caught:
        refuse_missing_paths(validate({section: {name: f"./{value}"}}))
    told = caught.value.args[0]
    assert told.startswith("./A") and f"Z does not exist in {Path.cwd()}: check {key}" in told
    assert len(told) < MOST


@pytest.mark.parametrize("value", [LONG, WORDS])
@pytest.mark.parametrize("text", ["{}", "{}=3", "train.{}=3", "train.steps={}", "train.steps=[{}"])
def test_an_override_of_any_length_is_refused_in_a_few_words(text: str, value: str) -> None:
    with pytest.raises(BadInput) as caught:
        demo_config([text.format(value)])
    assert len(caught.value.args[0]) < MOST


def test_a_bug_with_a_long_word_is_told_in_a_few(capsys: pytest.CaptureFixture[str]) -> None:
    assert tell(KeyError(LONG), debug=False) == errors.EXIT_BUG
    assert len(capsys.readouterr().err) < MOST
