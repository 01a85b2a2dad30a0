"""What is said of a wrong value: which part of which setting, what it holds, what it takes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fluxtrain.commands.paths import refuse_missing_paths
from fluxtrain.config.schema import validate
from fluxtrain.data.reading.request import read_request
from fluxtrain.errors import BadInput

SOURCES = "a path, or a list such as [a.jsonl, {path: b.jsonl, weight: 2}]"
PROMPTS = "the path of a file, or a list such as [Hello, How are you?]"
TARGETS = "'auto', or names of layers such as [q_proj, v_proj]"
ENTRY = "path, weight, configuration, split, format, columns"
NAN = float("nan")


def refusal(key: str, value: Any) -> str:
    section, _, name = key.partition(".")
    with pytest.raises(BadInput) as caught:
        validate({section: {name: value}}, "it")
    return str(caught.value).removeprefix("it: ")


@pytest.mark.parametrize(
    ("key", "value", "told"),
    [
        ("samples.prompts", [""], ", entry 1 = '': must not be empty"),
        ("samples.prompts", ["a", 3], ", entry 2 = 3: must be text: put it in quotes"),
        ("samples.prompts", "", f" = '': must not be empty, but {PROMPTS}"),
        ("samples.prompts", {"a": "b"}, f" = {{'a': 'b'}}: must be {PROMPTS}"),
        ("samples.prompts", 3, f" = 3: must be {PROMPTS}"),
        ("data.path", [], f" = []: must not be empty, but {SOURCES}"),
        ("data.path", {"path": "a"}, f" = {{'path': 'a'}}: must be {SOURCES}"),
        ("data.held_out_path", {"path": "a"}, f" = {{'path': 'a'}}: must be {SOURCES}"),
        ("data.path", None, f" = None: must be {SOURCES}"),
        ("data.path", [{"weight": 2}], f", entry 1 has no path: it has {ENTRY}"),
        ("data.path", [{"path": "a", "wieght": 2}],
         f", entry 1: unknown key 'wieght', it has {ENTRY}"),
        ("data.path", ["b", {"path": "a", "weight": NAN}],
         ", entry 2, weight = nan: must be a finite number"),
        ("data.path", [{"path": "a", "weight": 0}], ", entry 1, weight = 0: must be greater than"),
        ("data.path", [{"path": "a", "weight": True}],
         ", entry 1, weight = True: must not be true or false"),
        ("data.path", [{"path": "a", "format": "jsn"}], ", entry 1, format = 'jsn': must be 'au"),
        ("data.path", [{"path": "a", "columns": {"text": 3}}],
         ", entry 1, columns, text = 3: must be text: put it in quotes"),
        ("data.columns", {1: "a"}, ": the key 1 must be text: put it in quotes"),
        ("data.columns", 3, " = 3: must be a mapping"),
        ("data.roles", {"a": "b"}, ", a = 'b': must be 'system', 'developer'"),
        ("method.targets", [], f" = []: must not be empty, but {TARGETS}"),
        ("method.targets", 3, f" = 3: must be {TARGETS}"),
        ("method.targets", ["a", 3], ", entry 2 = 3: must be text: put it in quotes"),
        ("model.path", 123, " = 123: must be text: put it in quotes"),
        ("model.packed_cache", "x", " = 'x': must be true or false"),
        ("train.steps", "10k", " = '10k': must be a whole number (leave it out"),
        ("train.betas", ["a", 2], ", entry 1 = 'a': must be a number"),
        ("parallel.cards", [0, -1], ", entry 2 = -1: must be greater than or equal to 0"),
    ],
)  # fmt: skip
def test_the_part_that_is_wrong_is_named_with_what_it_takes(
    key: str, value: Any, told: str
) -> None:
    said = refusal(key, value)
    assert said.startswith(f"{key}{told}")
    assert not any(word in said for word in ("constrained", "union", "literal", "; ", "DataEntry"))


def test_every_entry_that_is_wrong_is_named() -> None:
    said = refusal("data.path", [{"path": "a", "weight": 0}, "b", {"path": "c", "wight": 1}, ""])
    assert [part.partition(" = ")[0].partition(":")[0] for part in said.split("; d")] == [
        "data.path, entry 1, weight", "ata.path, entry 4", "ata.path, entry 3"]  # fmt: skip


@pytest.mark.parametrize(
    "path", [["demo", "demo"], ["a.txt", "demo"], [{"path": "demo", "weight": 2}]]
)
def test_the_demos_text_is_trained_on_alone(path: Any) -> None:
    said = refusal("data.path", path)
    assert "demo is the text of Python's own library, which is trained on alone" in said
    assert "./demo for a file of this name" in said
    validate({"data": {"path": ["demo"]}})
    validate({"data": {"path": "demo", "held_out_path": ["demo", "b"]}})


@pytest.mark.parametrize("key", ["data.path", "data.held_out_path"])
@pytest.mark.parametrize("other", ["a.txt", {"path": "a.txt"}, {"path": "a.txt", "weight": 2}])
def test_a_source_that_is_named_twice_is_refused(key: str, other: Any) -> None:
    assert "a.txt is named twice: name it once, with `weight: 2`" in refusal(key, ["a.txt", other])


def test_a_file_that_two_entries_reach_is_refused_unless_it_is_read_in_two_ways(
    tmp_path: Path,
) -> None:
    for name in ("a.txt", "b.txt"):
        (tmp_path / name).write_text("words\n")
    file, pattern = str(tmp_path / "a.txt"), str(tmp_path / "*.txt")
    for entries in ([file, str(tmp_path)], [pattern, {"path": f"{tmp_path}/./a.txt", "weight": 2}]):
        with pytest.raises(BadInput, match=r"data.path names .*a.txt twice, in .* and in .*weight"):
            read_request({"path": entries}).corpus()
    both = read_request({"path": [pattern, {"path": file, "format": "plain"}]}).corpus()
    assert len(both.parts) == 3


def test_demo_is_a_file_where_data_of_ones_own_is_held_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    config = validate({"data": {"held_out_path": "demo"}})
    with pytest.raises(BadInput, match=r"demo does not exist in .*: check data.held_out_path"):
        refuse_missing_paths(config)
