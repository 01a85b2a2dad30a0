"""Rows as people really have them: what they say is used, refused with the cure, or counted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fluxtrain.errors import BadInput
from tests.unit.data_files import CHAT, corpus, lines, reported, rows, write

ASKED, SAID = CHAT
TOOL = {"type": "function", "function": {"name": "f", "parameters": {
    "type": "object", "properties": {"city": {"type": "string", "default": None}}}}}  # fmt: skip


def call(arguments: Any, **further: Any) -> dict[str, Any]:
    function = {"name": "f", "arguments": arguments}
    answer = {"role": "assistant", "content": None, "tool_calls": [{"function": function}]}
    return {"messages": [ASKED, answer | further]}


def refusal(path: Path, **settings: Any) -> str:
    with pytest.raises(BadInput) as refused:
        rows(path, **settings)
    return str(refused.value)


@pytest.mark.parametrize("value", [0, 0.0, False, 2])
@pytest.mark.parametrize(
    "key", ["weight", "train", "label", "loss_weight", "mask", "enable_thinking"]
)
def test_a_mark_of_a_row_is_refused_whatever_its_value(
    tmp_path: Path, key: str, value: Any
) -> None:
    path = lines(tmp_path, {"messages": CHAT, key: value})
    assert f"has the key `{key}`, which is not read" in refusal(path)
    _, report = reported(path, ignore=[key])
    assert report.ignored == {key: 1}
    if key not in ("weight", "train"):  # these are read within messages
        within = lines(tmp_path, {"messages": [ASKED, SAID | {key: value}]})
        if key in ("loss_weight", "mask"):
            assert f"message 2 has the key `{key}`" in refusal(within)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("turns", 4),
        ("weight", 1),
        ("train", True),
        ("images", []),
        ("images", False),
        ("label", ""),
    ],
)
def test_a_value_that_says_nothing_is_counted(tmp_path: Path, key: str, value: Any) -> None:
    _, report = reported(lines(tmp_path, {"messages": CHAT, key: value}))
    assert report.ignored == {key: 1}


def test_a_column_whose_name_is_taken_by_another_is_refused(tmp_path: Path) -> None:
    path = lines(tmp_path, {"prompt": "how", "completion": "bad", "best": "so"})
    columns = {"completion": "best"}
    assert "data.columns reads `best` in its place" in refusal(path, columns=columns)
    [row] = rows(path, columns=columns, ignore=["completion"])
    assert row.messages[-1]["content"] == "so"
    turns = [{"who": "user", "words": "how"}, {"who": "assistant", "words": "so"}]
    path = lines(tmp_path, {"messages": turns, "role": "teacher", "content": []})
    _, report = reported(path, columns={"role": "who", "content": "words"})
    assert report.ignored == {"role": 1, "content": 1}  # names of messages, not of rows


@pytest.mark.parametrize(
    ("turns", "expected"),
    [
        (["how", "so", "and", "thus"], ["how", "so", "and", "thus"]),
        ([["how", "so"], ["and", "thus"]], ["how", "so", "and", "thus"]),
        ([{"input": "how", "output": "so"}], ["how", "so"]),
        ([{"user": "how", "assistant": "so", "id": 3}], ["how", "so"]),
        ({"role": ["user", "assistant"], "content": ["how", "so"]}, ["how", "so"]),
        ({"from": ["human", "gpt"], "value": ["how", "so"]}, ["how", "so"]),
    ],
)
@pytest.mark.parametrize("as_text", [False, True])
def test_turns_without_roles_alternate(
    tmp_path: Path, turns: Any, expected: list[str], as_text: bool
) -> None:
    if as_text and isinstance(turns, dict):
        return
    value = json.dumps(turns) if as_text else turns
    path = lines(tmp_path, {"conversations": value})
    [row], report = reported(path)
    assert [message["content"] for message in row.messages] == expected
    assert [message["role"] for message in row.messages] == ["user", "assistant"] * (
        len(expected) // 2
    )
    assert row.weights == (0.0, 1.0) * (len(expected) // 2)
    assert set(report.ignored) == ({"id of messages"} if "id" in str(turns) else set())
    assert "`conversations` with" in corpus(path).parts[0].because


def test_turns_of_another_kind_than_the_first_are_refused(tmp_path: Path) -> None:
    for first, second in ((CHAT, ["how", "so"]), (["how", "so"], ["how", 3])):
        path = lines(tmp_path, {"messages": first}, {"messages": second})
        assert "line 2" in refusal(path)
    path = lines(tmp_path, {"conversation": [{"input": "how", "output": "so"}, {"input": "and"}]})
    assert "turn 2 is not written as the first one (`input` and `output`)" in refusal(path)


def test_calls_in_two_places_are_refused_and_what_stands_beside_them_is_kept(
    tmp_path: Path,
) -> None:
    both = call({}, function_call={"name": "g", "arguments": "{}"})
    assert "calls in `tool_calls` and `function_call`" in refusal(lines(tmp_path, both))
    turns = [
        {"from": "human", "value": "how"},
        {"from": "function_call", "value": '{"name": "f", "arguments": {}}', "reasoning": "why"},
    ]
    [row] = rows(lines(tmp_path, {"conversations": turns}))
    assert row.messages[1]["reasoning"] == "why"


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ('{"a": NaN}', "holds NaN or Infinity"),
        ('"{\\"a\\": 1, \\"a\\": 2}"', "the key 'a' twice"),
        ('"{\\"a\\": \\"\\\\ud800\\"}"', r"holds \ud800, half of a pair"),
        ('{"a": ' * 300 + "1" + "}" * 300, "nested too deeply"),
        (json.dumps('{"a": ' * 300 + "1" + "}" * 300), "nested too deeply"),
        ("\"{'a': 1}\"", "single quotes are Python's"),
    ],
)
def test_arguments_that_are_no_json_are_refused(
    tmp_path: Path, arguments: str, complaint: str
) -> None:
    row = json.dumps(call("HERE")).replace('"HERE"', arguments)
    assert complaint in refusal(write(tmp_path, "a.jsonl", row + "\n"))


def test_nan_is_an_empty_cell_and_a_fault_where_words_must_be(tmp_path: Path) -> None:
    path = write(tmp_path, "a.jsonl", '{"instruction": "how", "input": NaN, "output": "so"}\n')
    [row] = rows(path)
    assert row.messages[0]["content"] == "how"
    path = write(tmp_path, "b.jsonl", '{"instruction": "how", "input": "", "output": NaN}\n')
    assert "b.jsonl line 1" in refusal(path)


def test_nulls_that_a_table_padded_in_are_dropped_in_json_too(tmp_path: Path) -> None:
    padded = json.loads(json.dumps(TOOL))
    padded["function"] |= {"description": None}
    padded["function"]["parameters"]["properties"]["day"] = None
    padded["function"]["parameters"]["required"] = None
    [row] = rows(lines(tmp_path, call({"city": None, "day": None}) | {"tools": [padded]}))
    assert row.tools == (TOOL,)  # the default is null in the schema itself
    assert row.messages[1]["tool_calls"][0]["function"]["arguments"] == {"city": None}
    [row] = rows(lines(tmp_path, call({"day": None})))  # without its tool nothing is known
    assert row.messages[1]["tool_calls"][0]["function"]["arguments"] == {"day": None}


@pytest.mark.parametrize("words", ["", "  \n"])
def test_a_blank_answer_is_refused_unless_it_is_only_seen(tmp_path: Path, words: str) -> None:
    blank = {"role": "assistant", "content": words}
    assert "message 2: `content` is blank" in refusal(lines(tmp_path, {"messages": [ASKED, blank]}))
    seen = [ASKED, blank | {"weight": 0}, *CHAT]
    [row] = rows(lines(tmp_path, {"messages": seen}))
    assert row.weights == (0.0, 0.0, 0.0, 1.0)
    rows(lines(tmp_path, {"messages": [ASKED, blank | {"reasoning_content": "why"}]}))


def test_many_keys_with_one_twice_take_no_time(tmp_path: Path) -> None:
    keys = ",".join(f'"k{number}": 1' for number in range(200_000))
    path = write(tmp_path, "a.jsonl", f'{{{keys}, "text": "x", "z": 1, "z": 2}}\n')
    assert "has the key 'z' twice" in refusal(path)


@pytest.mark.parametrize("weight", [0, -1, 1001, float("inf"), float("nan")])
def test_a_weight_that_draws_nothing_or_for_ever_is_refused(tmp_path: Path, weight: float) -> None:
    path = lines(tmp_path, {"text": "a"})
    with pytest.raises(BadInput, match="above 0 and at most 1000"):
        corpus([{"path": str(path), "weight": weight}])
