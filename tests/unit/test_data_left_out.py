"""What a template leaves out of a conversation, and words that stand in it more than once."""

from __future__ import annotations

import json
from typing import Any

import pytest

from fluxtrain.data.rendering.left_out import left_out, lost_answer
from fluxtrain.data.row import Origin, Row

WEATHER = {"name": "weather", "description": "The weather of a town, by search"}


def call(name: str, **arguments: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


def row(*messages: dict[str, Any], tools: tuple[dict[str, Any], ...] = ()) -> Row:
    weights = tuple(float(message["role"] == "assistant") for message in messages)
    return Row(origin=Origin("a", 1), messages=messages, weights=weights, tools=tools)


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def answer(text: str, *calls: dict[str, Any]) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **({"tool_calls": calls} if calls else {})}


def written(message: dict[str, Any], *, calls: bool) -> str:
    found = [message["content"]]
    if calls:
        found += [json.dumps(one["function"]) for one in message.get("tool_calls", ())]
    return "\n".join(found)


SAYS_ITS_NAME = row(
    user("where is Paris?"),
    answer("", call("search", q="Paris")),
    {"role": "tool", "content": "in France", "tool_call_id": "1", "name": "search"},
    answer("The search says: 1 place in France."),
)
WORD_ALONE = row(user("weather"), answer("", call("weather")), answer("It is fine."))
TWICE = row(
    user("both"), answer("", call("find", a="x"), call("find", a="y")), answer("find, find")
)


@pytest.mark.parametrize("talk", [SAYS_ITS_NAME, WORD_ALONE, TWICE])
def test_a_call_is_lost_also_where_its_name_is_said(talk: Row) -> None:
    answers = [m for m in talk.messages if m["role"] == "assistant"]
    with_calls, without = ([written(m, calls=calls) for m in answers] for calls in (True, False))
    assert lost_answer(talk, with_calls) is None
    assert lost_answer(talk, without) == "a tool call"


def test_one_of_two_calls_that_is_lost_is_seen() -> None:
    first = written({**TWICE.messages[1], "tool_calls": TWICE.messages[1]["tool_calls"][:1]},
                    calls=True)  # fmt: skip
    assert lost_answer(TWICE, [first, "find, find"]) == "a tool call"


def test_an_id_is_left_out_where_its_number_is_said() -> None:
    texts = [written(m, calls=True) for m in SAYS_ITS_NAME.messages]
    assert left_out(SAYS_ITS_NAME, texts) == {"`name` of a message", "`tool_call_id` of a message"}
    both = [*texts, "search", "id 1"]
    assert left_out(SAYS_ITS_NAME, both) == set()


@pytest.mark.parametrize("described", [True, False])
def test_a_tool_that_the_template_does_not_describe_costs_no_call(described: bool) -> None:
    tool = WEATHER if described else {"name": "weather"}
    talk = row(user("Rain?"), answer("", call("weather")), answer("No."), tools=(tool,))
    texts = [written(m, calls=True) for m in talk.messages]
    assert left_out(talk, texts) == set(), "its name is there"
    assert left_out(talk, [json.dumps(tool), *texts]) == set()
    lost = [json.dumps(WEATHER), *(written(m, calls=False) for m in talk.messages)]
    if described:
        assert left_out(talk, lost) == {"a tool call"}
