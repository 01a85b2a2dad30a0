"""Finds what stands in a conversation and not in its rendering, so that it can be said."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from fluxtrain.data.row import Message, Row

_REASONING = ("reasoning_content", "reasoning", "thinking")
_CALL = "a tool call"
_OF_ROLES = {
    "system": "a system message",
    "developer": "a developer message",
    "user": "a user's message",
    "assistant": "an answer",
    "tool": "a tool's answer",
}


def left_out(row: Row, texts: list[str]) -> set[str]:
    """Name what of `row` is in none of `texts`, all that the model sees of it.

    White space does not count, as templates trim it, nor does what comes behind the last answer
    to learn.
    """
    learnt = [i for i, m in enumerate(row.messages) if m["role"] == "assistant" and row.weights[i]]
    seen = _Seen("\n".join(texts))
    missing = {
        name
        for message in row.messages[: learnt[-1] + 1]
        for name, words in _parts(message)
        if not seen.holds(words)
    }
    if any(not seen.holds(_name_of(tool)) for tool in row.tools):
        missing.add("`tools`")
    return missing


def lost_answer(row: Row, texts: list[str], after_question: bool = False) -> str | None:
    """Name what of an answer to learn is in none of `texts`; None where all its words are.

    Its reasoning may be left out, and arguments may be written in another way. `after_question`:
    answers before the first question are not looked for.
    """
    asked = not after_question
    seen = _Seen("\n".join(texts))
    for message, weight in zip(row.messages, row.weights, strict=True):
        asked |= message["role"] == "user"
        if message["role"] != "assistant" or not weight or not asked:
            continue
        for name, words in _parts(message):
            if name in (_OF_ROLES["assistant"], _CALL) and not seen.holds(words):
                return name
    return None


class _Seen:
    """A text to look in, with and without its white space."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._dense: str | None = None

    def holds(self, words: str) -> bool:
        if words.strip() in self._text:
            return True
        if self._dense is None:
            self._dense = "".join(self._text.split())
        dense = "".join(words.split())
        return dense in self._dense or json.dumps(dense, ensure_ascii=False)[1:-1] in self._dense


def _parts(message: Message) -> Iterator[tuple[str, str]]:
    """Yield the parts of a message that a template may leave out: what each is, and its words."""
    content = message.get("content") or ""
    if message["role"] == "assistant" and "</think>" in content:
        thought, _, content = content.rpartition("</think>")
        yield "the reasoning of an answer", thought.replace("<think>", "").replace("</think>", "")
    yield _OF_ROLES.get(message["role"], "a message"), content
    for key in _REASONING:
        if message.get(key):
            yield "the reasoning of an answer", str(message[key])
    for key in ("name", "tool_call_id"):
        if message.get(key):
            yield f"`{key}` of a message", str(message[key])
    for call in message.get("tool_calls") or ():
        yield _CALL, _name_of(call)
        if isinstance(call.get("function"), dict):
            for leaf in _strings(call["function"].get("arguments")):
                yield "arguments of a tool call", leaf


def _name_of(described: dict[str, Any]) -> str:
    function = described.get("function", described)
    return str(function.get("name", "")) if isinstance(function, dict) else ""


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for inner in value.values():
            yield from _strings(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _strings(inner)
