"""Shapes: recognised by keys, brought into one normal form, refused where they are not sure."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fluxtrain.data.row import Row
from fluxtrain.errors import BadInput
from tests.unit.data_files import CHAT, corpus, lines, reported, rows, write


def said(row: Row) -> list[tuple[str, str | None, float]]:
    """Who says what, and with which weight."""
    pairs = zip(row.messages, row.weights, strict=True)
    return [(message["role"], message["content"], weight) for message, weight in pairs]


def refusal(path: Path, **settings: Any) -> str:
    with pytest.raises(BadInput) as refused:
        rows(path, **settings)
    return str(refused.value)


ASKED, ANSWERED = ("user", "how", 0.0), ("assistant", "so", 1.0)
SHARE = [{"from": "human", "value": "how"}, {"from": "gpt", "value": "so"}]
ROLES = [{"role": "user", "content": "how"}, {"role": "assistant", "content": "so"}]


@pytest.mark.parametrize(
    ("record", "shape", "expected"),
    [
        ({"messages": ROLES}, "messages", [ASKED, ANSWERED]),
        ({"conversation": ROLES}, "messages", [ASKED, ANSWERED]),
        ({"dialog": ROLES}, "messages", [ASKED, ANSWERED]),
        ({"conversations": ROLES}, "messages", [ASKED, ANSWERED]),
        ({"conversations": SHARE}, "sharegpt", [ASKED, ANSWERED]),
        ({"messages": SHARE}, "sharegpt", [ASKED, ANSWERED]),
        (
            {"conversations": SHARE, "system": "be brief"},
            "sharegpt",
            [("system", "be brief", 0.0), ASKED, ANSWERED],
        ),
        ({"prompt": "how", "completion": "so"}, "completion", [ASKED, ANSWERED]),
        ({"prompt": ROLES[:1], "completion": ROLES[1:]}, "completion", [ASKED, ANSWERED]),
        ({"instruction": "how", "output": "so"}, "alpaca", [ASKED, ANSWERED]),
        ({"instruction": "how", "input": "", "output": "so"}, "alpaca", [ASKED, ANSWERED]),
        (
            {"instruction": "explain", "input": "mill", "output": "so"},
            "alpaca",
            [("user", "explain\nmill", 0.0), ANSWERED],
        ),
        (
            {"instruction": "how", "output": "so", "system": "s", "history": [["a", "b"]]},
            "alpaca",
            [("system", "s", 0.0), ("user", "a", 0.0), ("assistant", "b", 1.0), ASKED, ANSWERED],
        ),
    ],
)
def test_a_shape_is_recognised_and_becomes_messages_with_weights(
    tmp_path: Path, record: dict[str, Any], shape: str, expected: list[Any]
) -> None:
    path = lines(tmp_path, record)
    [part] = corpus(path).parts
    assert part.shape == shape
    [row] = rows(path)
    assert said(row) == expected
    assert row.plain == (record.get("prompt") == "how")


def test_a_title_stands_on_a_line_above_its_text(tmp_path: Path) -> None:
    path = lines(tmp_path, {"title": "Mills", "text": "They grind."}, {"text": "No title."})
    assert [row.text for row in rows(path)] == ["Mills\nThey grind.", "No title."]
    assert "`title` and `text`" in corpus(path).parts[0].because


@pytest.mark.parametrize(
    ("name", "role"),
    [
        ("human", "user"), ("user", "user"), ("gpt", "assistant"), ("assistant", "assistant"),
        ("model", "assistant"), ("chatgpt", "assistant"), ("Human", "user"), ("system", "system"),
        ("tool", "tool"), ("observation", "tool"), ("function_response", "tool"),
    ],
)  # fmt: skip
def test_common_names_of_roles_are_known(tmp_path: Path, name: str, role: str) -> None:
    turns = [{"from": name, "value": "x"}, *SHARE]
    [row] = rows(lines(tmp_path, {"conversations": turns}))
    assert row.messages[0]["role"] == role


CALL = {"name": "weather", "arguments": {"city": "Oslo", "unit": None}}
NORMAL_CALL = {"type": "function", "function": CALL}


@pytest.mark.parametrize(
    "calls",
    [
        [{"type": "function", "function": CALL}],
        [{"type": "function", "function": {**CALL, "arguments": json.dumps(CALL["arguments"])}}],
        [CALL],
        json.dumps([{"function": CALL}]),
    ],
)
def test_calls_of_tools_have_one_form_with_arguments_as_an_object(
    tmp_path: Path, calls: Any
) -> None:
    turns = [ROLES[0], {"role": "assistant", "content": None, "tool_calls": calls}]
    [row] = rows(lines(tmp_path, {"messages": turns}))
    assert row.messages[1] == {"role": "assistant", "content": None, "tool_calls": [NORMAL_CALL]}


def test_the_calls_of_sharegpt_and_of_the_older_api_are_calls(tmp_path: Path) -> None:
    turns = [
        SHARE[0],
        {"from": "function_call", "value": json.dumps(CALL)},
        {"from": "observation", "value": "rain"},
        SHARE[1],
    ]
    tools = json.dumps([{"name": "weather", "parameters": {"type": "object"}}])
    [row] = rows(lines(tmp_path, {"conversations": turns, "tools": tools}))
    assert row.messages[1]["tool_calls"] == [NORMAL_CALL]
    assert row.messages[2] == {"role": "tool", "content": "rain"}
    assert row.weights == (0.0, 1.0, 0.0, 1.0)
    assert row.tools == (
        {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}},
    )
    older = [ROLES[0], {"role": "assistant", "content": "", "function_call": CALL}]
    [row] = rows(lines(tmp_path, {"messages": older, "functions": [{"name": "weather"}]}))
    assert row.messages[1] == {"role": "assistant", "content": "", "tool_calls": [NORMAL_CALL]}
    assert row.tools[0]["function"]["name"] == "weather"


def test_names_ids_of_calls_and_thoughts_are_kept(tmp_path: Path) -> None:
    turns = [
        {**ROLES[0], "name": "Ada"},
        {"role": "assistant", "content": "", "tool_calls": [{"id": "c1", "function": CALL}]},
        {"role": "tool", "content": "rain", "tool_call_id": "c1", "name": "weather"},
        {**ROLES[1], "reasoning_content": "it rains"},
    ]
    [row] = rows(lines(tmp_path, {"messages": turns}))
    assert row.messages[0]["name"] == "Ada"
    assert row.messages[1]["tool_calls"][0]["id"] == "c1"
    assert row.messages[2] == turns[2]
    assert row.messages[3] == turns[3]


@pytest.mark.parametrize(
    "parts",
    [
        [{"type": "text", "text": "so"}],
        [{"type": "text", "text": "s"}, {"type": "text", "text": "o"}],
        ["s", "o"],
        [{"text": "so"}],
        [{"type": "text", "text": "so", "image_url": None}],
    ],
)
def test_parts_of_text_are_joined(tmp_path: Path, parts: list[Any]) -> None:
    [row] = rows(lines(tmp_path, {"messages": [ROLES[0], {**ROLES[1], "content": parts}]}))
    assert said(row) == [ASKED, ANSWERED]


def test_weights_of_messages_say_what_is_trained_on(tmp_path: Path) -> None:
    for off, on in (({"weight": 0}, {"weight": 1}), ({"train": False}, {}), ({"loss": False}, {})):
        turns = [ROLES[0], {**ROLES[1], **off}, ROLES[0], {**ROLES[1], **on}]
        [row] = rows(lines(tmp_path, {"messages": turns}))
        assert row.weights == (0.0, 0.0, 0.0, 1.0)


@pytest.mark.parametrize(
    ("turns", "complaint"),
    [
        ([ROLES[0], {**ROLES[1], "weight": 0.5}], "message 2: `weight` is 0.5, and a message is"),
        ([{**ROLES[0], "weight": 1}, ROLES[1]], "only the assistant's messages are trained on"),
        ([ROLES[0], {**ROLES[1], "weight": 0}], "has weight 0, so there is nothing to learn"),
        ([ROLES[0], {**ROLES[1], "content": [{"type": "image_url", "image_url": "x"}]}],
         "`content[0]` is of type 'image_url'"),
        ([ROLES[0], {**ROLES[1], "images": ["a.png"]}], "message 2 has the key `images`"),
        ([{**ROLES[0], "tool_calls": [NORMAL_CALL]}, ROLES[1]], "only the assistant calls tools"),
        ([ROLES[0], {"role": "assistant", "tool_calls": [{"function": {"name": "f",
          "arguments": "{cut"}}]}], "arguments` is a string that is not JSON"),
        ([ROLES[0], {"role": "assistant", "tool_calls": [{"function": {"name": "f",
          "arguments": "[1]"}}]}], "arguments` is a list, and it must be an object"),
        ([ROLES[0], {"role": "assistant", "tool_calls": [{"type": "web_search"}]}],
         "is of type 'web_search'"),
    ],
)  # fmt: skip
def test_messages_that_cannot_be_used_are_refused_with_their_place(
    tmp_path: Path, turns: list[Any], complaint: str
) -> None:
    assert complaint in refusal(lines(tmp_path, {"messages": CHAT}, {"messages": turns}))


@pytest.mark.parametrize(
    ("record", "named"),
    [
        ({"prompt": "how", "chosen": "so", "rejected": "no"}, "prompt, chosen, rejected"),
        ({"chosen": ROLES, "rejected": ROLES}, "chosen, rejected"),
        ({"prompt": "how", "completion": "so", "label": True}, "completion, label"),
    ],
)
def test_preference_rows_are_recognised_and_refused_by_name(
    tmp_path: Path, record: dict[str, Any], named: str
) -> None:
    assert f"is a preference row ({named})" in refusal(lines(tmp_path, record))


def test_the_cure_for_a_preference_row_works(tmp_path: Path) -> None:
    path = lines(tmp_path, {"prompt": "how", "chosen": "so", "rejected": "no"})
    columns = {"prompt": "prompt", "completion": "chosen"}
    [row] = rows(path, columns=columns, ignore=["rejected"])
    assert said(row) == [ASKED, ANSWERED]


def test_keys_and_roles_of_messages_are_mapped(tmp_path: Path) -> None:
    turns = [{"speaker": "patient", "words": "how"}, {"speaker": "doctor", "words": "so"}]
    path = lines(tmp_path, {"talk": turns})
    assert "set data.columns: {messages: talk, role: ..., content: ...}" in refusal(path)
    named = lines(tmp_path, {"Messages": [{"Role": "user", "Content": "how"}]})
    assert "{messages: Messages, role: Role, content: Content}" in refusal(named)
    path = lines(tmp_path, {"talk": turns})
    [row] = rows(
        path,
        columns={"messages": "talk", "role": "speaker", "content": "words"},
        roles={"patient": "user", "doctor": "assistant"},
    )
    assert said(row) == [ASKED, ANSWERED]


def test_an_unknown_name_in_columns_is_refused(tmp_path: Path) -> None:
    path = lines(tmp_path, {"text": "x"})
    assert "data.columns has 'answer', and it names one of" in refusal(
        path, columns={"answer": "x"}
    )


def test_a_row_that_could_be_read_in_two_ways_is_not_guessed(tmp_path: Path) -> None:
    record = {"prompt": "how", "completion": "so", "text": "quite another text"}
    path = lines(tmp_path, record)
    assert "can be read as completion (`prompt` and `completion`) or text (`text`)" in refusal(path)
    both = refusal(path, format="completion")
    assert "has the key `text`, which is not read in prompts with completions" in both
    [row] = rows(path, format="completion", ignore=["text"])
    assert said(row) == [ASKED, ANSWERED]


def test_a_text_that_only_renders_the_other_keys_is_counted(tmp_path: Path) -> None:
    text = "### Instruction:\nhow\n\n### Response:\nso"
    found, report = reported(lines(tmp_path, {"instruction": "how", "output": "so", "text": text}))
    assert said(found[0]) == [ASKED, ANSWERED]
    assert report.ignored == {"text": 1}
    messages = lines(tmp_path, {"prompt": "how", "messages": ROLES, "prompt_id": "1"})
    assert reported(messages)[1].ignored == {"prompt": 1, "prompt_id": 1}


def test_mixed_shapes_in_one_file_are_refused_by_line(tmp_path: Path) -> None:
    path = lines(tmp_path, {"text": "x"}, {"messages": CHAT}, {"prompt": "a", "completion": "b"})
    told = refusal(path)
    assert "line 2 has `messages` with `role` and `content`, and the file's first row" in told
    assert "line 3 has `prompt` and `completion`, and" in told
    share = lines(tmp_path, {"messages": CHAT}, {"messages": SHARE})
    assert "line 2 is of another shape (ShareGPT" in refusal(share)


def test_conversations_in_a_table_are_json_in_a_cell(tmp_path: Path) -> None:
    cell = json.dumps(ROLES).replace('"', '""')
    [row] = rows(write(tmp_path, "a.csv", f'messages,id\n"{cell}",7\n'))
    assert said(row) == [ASKED, ANSWERED]


@pytest.mark.parametrize(
    ("record", "complaint"),
    [
        ({"prompt": "how", "completion": " "}, "`completion` is blank, so there is nothing"),
        ({"prompt": "how", "completion": 3}, "`completion` is a number, and it must be a string"),
        ({"prompt": "how", "completion": ROLES[1:]}, "both as strings or both as lists"),
        ({"prompt": "how"}, "has no `completion`"),
    ],
)
def test_completions_that_cannot_be_used_are_refused(
    tmp_path: Path, record: dict[str, Any], complaint: str
) -> None:
    assert complaint in refusal(lines(tmp_path, {"prompt": "a", "completion": "b"}, record))


def test_an_answer_without_a_question_is_refused(tmp_path: Path) -> None:
    good = {"instruction": "how", "output": "so"}
    told = refusal(lines(tmp_path, good, {"instruction": " ", "input": "", "output": "so"}))
    assert "line 2: `instruction` is blank, so the answer follows nothing" in told
