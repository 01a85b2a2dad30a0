"""Brings conversations into the normal form of `Message`, with the weight of each message."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from fluxtrain.data.containers.record import keys_of, kind_of
from fluxtrain.data.row import ROLES, Message
from fluxtrain.data.shapes.keys import says_something
from fluxtrain.data.shapes.refused import RowRefused, is_missing, string_of
from fluxtrain.data.shapes.tools import calls_of

CALLS = "calls of tools"  # a role whose content is the calls themselves

ROLE_NAMES: dict[str, str] = {
    **{role: role for role in ROLES},
    **dict.fromkeys(("human", "prompter"), "user"),
    **dict.fromkeys(
        ("gpt", "chatgpt", "model", "bot", "ai", "chatbot", "claude", "bard", "bing"), "assistant"
    ),
    **dict.fromkeys(
        ("observation", "function", "tool_response", "function_response", "ipython"), "tool"
    ),
    **dict.fromkeys(("function_call", "tool_call"), CALLS),
}
REASONING = ("reasoning_content", "reasoning", "thinking")

_WEIGHTS = ("weight", "train", "loss")  # of OpenAI and Axolotl, of Axolotl, of ms-swift
_USED = frozenset({"tool_calls", "tool_call_id", "name", "function_call", *REASONING, *_WEIGHTS})
_CONTENT = frozenset(
    {"role", "content", "from", "value", "text", "parts", "prefix", "tools", "documents"}
    | {"image", "images", "audio", "video", "videos", "refusal", "thought", "attachments", "input"}
    | {"output", "prompt", "response", "instruction", "loss_weight", "mask", "training", "weights"}
    | {"train_detail", "kto_tag"}
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Turns:
    """How the messages of a file are written."""

    role: str = "role"
    content: str = "content"
    roles: Mapping[str, str] = field(default_factory=dict)  # names of the file, to ours
    ignore: tuple[str, ...] = ()


def conversation(
    turns: list[Any], written: Turns, count: Callable[[str], object], key: str = "messages"
) -> tuple[tuple[Message, ...], tuple[float, ...]]:
    """Return the messages and their weights; `count` is called with each key that is left out.

    Raises RowRefused for a message that cannot be used, and where there is nothing to learn.
    """
    if not turns:
        raise RowRefused(f": `{key}` is empty: remove the row or fill it")
    messages: list[Message] = []
    weights: list[float] = []
    for number, turn in enumerate(turns, start=1):
        try:
            message = _message(turn, written, count)
            weights.append(_weight(turn, message["role"]))
        except RowRefused as refused:
            raise RowRefused(f", message {number}{refused}") from refused
        messages.append(message)
    if all(message["role"] != "assistant" for message in messages):
        roles = ", ".join(message["role"] for message in messages[:8])
        raise RowRefused(
            f": no message has the role assistant (roles: {roles}), so there is nothing to learn: "
            "the loss is on the assistant's words"
        )
    for number, (message, weight) in enumerate(zip(messages, weights, strict=True), start=1):
        if weight and _is_wordless(message):
            raise RowRefused(
                f", message {number}: `{written.content}` is blank, so nothing but an end would be "
                "trained of it: fill it, give it weight 0, or remove the row"
            )
    if not any(weights):
        raise RowRefused(
            ": every message of the assistant has weight 0, so there is nothing to learn: "
            "remove the row"
        )
    return tuple(messages), tuple(weights)


def _message(turn: Any, written: Turns, count: Callable[[str], object]) -> Message:
    if not isinstance(turn, dict):
        raise RowRefused(
            f' is {kind_of(turn)}: write {{"{written.role}": ..., "{written.content}": ...}}'
        )
    turn = {key: value for key, value in turn.items() if not is_missing(value)}
    role = _role(turn, written)
    _account_for(turn, written, count)
    content = turn.get(written.content)
    made: Message = {"role": "assistant" if role == CALLS else role, "content": None}
    named = {key: turn[key] for key in ("tool_calls", "function_call") if turn.get(key)}
    if role == CALLS:
        named[written.content] = content
    if len(named) > 1:
        raise RowRefused(f" has calls in {' and '.join(f'`{key}`' for key in named)}: keep one")
    for name, calls in named.items():
        if made["role"] != "assistant":
            raise RowRefused(f": the {role} has `tool_calls`, and only the assistant calls tools")
        made["tool_calls"] = calls_of(calls, name)
    if role != CALLS and (content is not None or not named):
        made["content"] = _text(content, written.content, turn)
    for key in ("name", "tool_call_id", *REASONING):
        if key in turn:
            made[key] = string_of(turn[key], key)
    return made


def _is_wordless(message: Message) -> bool:
    said = [message.get("content"), *(message.get(key) for key in REASONING)]
    return not message.get("tool_calls") and not any(words and words.strip() for words in said)


def _role(turn: Mapping[str, Any], written: Turns) -> str:
    if written.role not in turn:
        raise RowRefused(
            f" has no `{written.role}` (its keys: {keys_of(dict(turn))}): add one of "
            f"{', '.join(ROLES)}, or name the key of the role in data.columns"
        )
    named = turn[written.role]
    if not isinstance(named, str):
        raise RowRefused(f": `{written.role}` is {kind_of(named)}, and it must be a string")
    role = written.roles.get(named) or ROLE_NAMES.get(named.strip().lower())
    if role is None:
        raise RowRefused(
            f": {written.role} {named!r} is not one of {', '.join(ROLES)}; if it means one of them,"
            f" set data.roles: {{{named}: ...}}"
        )
    return role


def _account_for(turn: Mapping[str, Any], written: Turns, count: Callable[[str], object]) -> None:
    """Count keys without content for the model; refuse keys with content."""
    for key, value in turn.items():
        if key in (written.role, written.content) or key in _USED:
            continue
        if says_something(key, value, _CONTENT) and key not in written.ignore:
            raise RowRefused(
                f" has the key `{key}`, which is not read beside `{written.content}`: put its "
                f"words into `{written.content}`, or name it in data.ignore"
            )
        count(f"{key} of messages")


def _text(content: Any, name: str, turn: Mapping[str, Any]) -> str:
    if isinstance(content, list):
        return "".join(_part(part, f"{name}[{index}]") for index, part in enumerate(content))
    if not isinstance(content, str):
        raise RowRefused(
            f": `{name}` is {kind_of(content)}, and it must be a string or a list of text parts "
            f"(its keys: {keys_of(dict(turn))})"
        )
    return content


def _part(part: Any, where: str) -> str:
    """Return the words of one part; parts that are no text are refused by their type."""
    if isinstance(part, str):
        return part
    if not isinstance(part, dict):
        raise RowRefused(f": `{where}` is {kind_of(part)}, and it must be a text part")
    part = {key: value for key, value in part.items() if value is not None}
    kind = part.get("type", "text")
    text = part.get("text", part.get("content") if kind == "text" else None)
    if kind not in ("text", "input_text", "output_text") or not isinstance(text, str):
        raise RowRefused(
            f": `{where}` is of type {kind!r} (its keys: {keys_of(part)}), and only text is "
            "trained: remove the part or the row"
        )
    foreign = set(part) - {"type", "text", "content", "cache_control", "annotations", "index"}
    if foreign:
        raise RowRefused(f": `{where}` has the key `{min(foreign)}` beside its text")
    return text


def _weight(turn: Mapping[str, Any], role: str) -> float:
    """Return 1.0 if the message is trained on, else 0.0."""
    said = {key: turn[key] for key in _WEIGHTS if turn.get(key) is not None}
    for key, value in said.items():
        if not isinstance(value, bool | int | float) or value not in (0, 1):
            raise RowRefused(
                f": `{key}` is {value!r}, and a message is trained on whole (1) or not at all (0)"
            )
        if value == 1 and role != "assistant":
            raise RowRefused(
                f": `{key}` is {value!r} on a message of the {role}, and only the assistant's "
                "messages are trained on: set it to 0 or remove it"
            )
    return float(role == "assistant" and all(said.values()))
