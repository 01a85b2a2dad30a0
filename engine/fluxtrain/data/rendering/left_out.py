"""Finds what stands in a conversation and not in its rendering, so that it can be said."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator
from functools import cached_property
from typing import Any

from fluxtrain.data.row import Message, Row

_REASONING = ("reasoning_content", "reasoning", "thinking")
_CALL, _NAME, _ID = "a tool call", "`name` of a message", "`tool_call_id` of a message"
_ARGUMENTS = "arguments of a tool call"
_MARKS = (_CALL, _NAME, _ID)  # a word or a number, which may stand in what is said as well
_OF_ROLES = {
    "system": "a system message",
    "developer": "a developer message",
    "user": "a user's message",
    "assistant": "an answer",
    "tool": "a tool's answer",
}


def left_out(row: Row, texts: list[str]) -> set[str]:
    """Name the parts of `row` that are in none of `texts`, which are all that the model gets.

    White space does not count, as templates trim it, nor does anything behind the last trained
    answer.
    """
    trained = [i for i, m in enumerate(row.messages) if m["role"] == "assistant" and row.weights[i]]
    parts = [part for message in row.messages[: trained[-1] + 1] for part in _parts(message)]
    seen = _Seen(texts, parts, row.tools)
    missing = {name for name, words in parts if not seen.holds_part(name, words)}
    if any(not seen.holds(_name_of(tool)) for tool in row.tools):
        missing.add("`tools`")
    return missing


def lost_answer(row: Row, texts: list[str], after_question: bool = False) -> str | None:
    """Name what of a trained answer is in none of `texts`, which are the answers; None where all
    its words are.

    Its reasoning may be left out, and arguments may be written in another way. `after_question`:
    answers before the first question are not looked for.
    """
    asked = not after_question
    parts: list[tuple[str, str]] = []
    for message, weight in zip(row.messages, row.weights, strict=True):
        asked |= message["role"] == "user"
        if message["role"] == "assistant" and weight and asked:
            parts += _parts(message)
    seen = _Seen(texts, parts)
    for name, words in parts:
        if name in (_OF_ROLES["assistant"], _CALL) and not seen.holds_part(name, words):
            return name
    return None


class _Seen:
    """A text made of `parts`, to search with and without its white space."""

    def __init__(
        self, texts: list[str], parts: list[tuple[str, str]], tools: Iterable[dict[str, Any]] = ()
    ) -> None:
        self._text = "\n".join(texts)
        self._dense: str | None = None
        self._parts, self._tools = Counter(parts), tools

    def holds(self, words: str) -> bool:
        return words.strip() in self._text or self._count(words) > 0

    def holds_part(self, name: str, words: str) -> bool:
        """Return whether a part occurs; for a word alone, such as the name of a tool, as a word
        besides the content, which may contain it too."""
        if name not in _MARKS or not words.strip():
            return self.holds(words)
        alike = sum(self._parts[one, words] for one in _MARKS[: _MARKS.index(name) + 1])
        return self._count(words) >= alike + self._said.count(_dense(words))

    @cached_property
    def _said(self) -> str:
        """Return the content and the descriptions of tools, as far as they are present, without
        white space. A tool without a description may be left out: its name alone proves nothing."""
        said = [
            words for name, words in self._parts.elements() if name not in (*_MARKS, _ARGUMENTS)
        ]
        for tool in self._tools:
            function = tool.get("function", tool)
            described = function.get("description") if isinstance(function, dict) else None
            if isinstance(described, str) and described.strip() and self.holds(described):
                said += _strings(tool)
        return "\n".join(_dense(words) for words in said if self.holds(words))

    def _count(self, words: str) -> int:
        if self._dense is None:
            self._dense = _dense(self._text)
        dense = _dense(words)
        escaped = json.dumps(dense, ensure_ascii=False)[1:-1]
        return max(self._dense.count(form) for form in {dense, escaped})


def _dense(text: str) -> str:
    return "".join(text.split())


def _parts(message: Message) -> Iterator[tuple[str, str]]:
    """Yield the parts of a message that a template may leave out: the kind of each, and
    its words."""
    content = message.get("content") or ""
    if message["role"] == "assistant" and "</think>" in content:
        thought, _, content = content.rpartition("</think>")
        yield "the reasoning of an answer", thought.replace("<think>", "").replace("</think>", "")
    yield _OF_ROLES.get(message["role"], "a message"), content
    for key in _REASONING:
        if message.get(key):
            yield "the reasoning of an answer", str(message[key])
    for key, name in (("name", _NAME), ("tool_call_id", _ID)):
        if message.get(key):
            yield name, str(message[key])
    for call in message.get("tool_calls") or ():
        yield _CALL, _name_of(call)
        if isinstance(call.get("function"), dict):
            for leaf in _strings(call["function"].get("arguments")):
                yield _ARGUMENTS, leaf


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
