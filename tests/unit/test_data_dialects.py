"""Random conversations come out the same, in whatever dialect and container a file has them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.unit.data_files import contents, lines, rows, write

said = st.text(st.characters(codec="utf-8", exclude_categories=("Cs",)), max_size=12)
answered = said.filter(lambda words: bool(words.strip()))
scalars = st.booleans() | st.integers(-99, 99) | said
arguments = st.dictionaries(st.sampled_from(["city", "unit", "days"]), scalars, max_size=3)
calls = st.lists(
    st.fixed_dictionaries({"name": st.sampled_from(["weather", "clock"]), "arguments": arguments}),
    min_size=1,
    max_size=2,
)
NAMES = {"user": "human", "assistant": "gpt", "system": "system", "tool": "observation"}


@st.composite
def conversations(draw: st.DrawFn) -> list[dict[str, Any]]:
    """Messages in their normal form; at least one is the assistant's and is trained on."""
    turns: list[dict[str, Any]] = []
    for _ in range(draw(st.integers(0, 4))):
        role = draw(st.sampled_from(["user", "assistant", "tool"]))
        words = draw(answered if role == "assistant" else said)
        turn: dict[str, Any] = {"role": role, "content": words}
        if role == "assistant" and draw(st.booleans()):
            normal = [{"type": "function", "function": call} for call in draw(calls)]
            turn |= {"content": None, "tool_calls": normal}
        turns.append(turn)
    if draw(st.booleans()):
        turns.insert(0, {"role": "system", "content": draw(said)})
    return [*turns, {"role": "assistant", "content": draw(answered)}]


weighing = st.lists(st.booleans(), min_size=6, max_size=6)


def in_parts(turn: dict[str, Any], cut: int) -> dict[str, Any]:
    text = turn["content"]
    if text is None:
        return turn
    parts = [{"type": "text", "text": piece} for piece in (text[:cut], text[cut:])]
    return {**turn, "content": parts}


def with_text_arguments(turn: dict[str, Any]) -> dict[str, Any]:
    if "tool_calls" not in turn:
        return turn
    functions = (call["function"] for call in turn["tool_calls"])
    return {
        **turn,
        "tool_calls": [
            {"type": "function", "function": {**f, "arguments": json.dumps(f["arguments"])}}
            for f in functions
        ],
    }


def of_sharegpt(turn: dict[str, Any]) -> dict[str, Any]:
    if "tool_calls" in turn:
        functions = [call["function"] for call in turn["tool_calls"]]
        return {"from": "function_call", "value": json.dumps(functions)}
    return {"from": NAMES[turn["role"]], "value": turn["content"]}


@given(turns=conversations(), cut=st.integers(0, 12))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_every_dialect_of_a_conversation_is_the_same_row(
    tmp_path: Path, turns: list[dict[str, Any]], cut: int
) -> None:
    dialects: list[dict[str, Any]] = [
        {"messages": turns},
        {"messages": [with_text_arguments(turn) for turn in turns]},
        {"messages": [in_parts(turn, cut) for turn in turns]},
        {"messages": json.dumps(turns)},
        {"conversations": [of_sharegpt(turn) for turn in turns]},
    ]
    for number, record in enumerate(dialects):
        [row] = rows(lines(tmp_path, record, name=f"{number}.jsonl"))
        assert list(row.messages) == turns, number
        assert row.weights == tuple(float(turn["role"] == "assistant") for turn in turns)


@given(some=st.lists(conversations(), min_size=1, max_size=4))
@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_columns_give_the_conversations_that_lines_give(
    tmp_path: Path, some: list[list[dict[str, Any]]]
) -> None:
    """Arguments go into columns as JSON in strings, as every published data set has them."""
    records = [{"messages": [with_text_arguments(turn) for turn in turns]} for turns in some]
    for kind in ("parquet", "arrow", "json"):
        found = rows(write(tmp_path, f"a.{kind}", contents(kind, records)))
        assert [list(row.messages) for row in found] == some, kind


@given(turns=conversations(), trained=weighing)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_weights_are_those_of_the_file(
    tmp_path: Path, turns: list[dict[str, Any]], trained: list[bool]
) -> None:
    marks = [
        bool(mark) if turn["role"] == "assistant" else False
        for turn, mark in zip(turns, [*trained[: len(turns) - 1], True], strict=True)
    ]
    weighed = [{**turn, "weight": int(mark)} for turn, mark in zip(turns, marks, strict=True)]
    [row] = rows(lines(tmp_path, {"messages": weighed}))
    assert row.weights == tuple(float(mark) for mark in marks)
    assert list(row.messages) == turns, "the weight itself is no part of a message"
