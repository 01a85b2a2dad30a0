"""The keys of rows: which shape they make, and what becomes of the keys that a shape does not use.

Every key is used, refused, or counted. Refused is what plainly says or shows something to the
model, or says what is trained on: leaving it out in silence would train on something else than the
file means.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from fluxtrain.data.containers.record import kind_of
from fluxtrain.data.shapes.turns import parsed_turns, way_of

Shape = Literal["text", "messages", "sharegpt", "alpaca", "completion"]
SHAPES: tuple[Shape, ...] = get_args(Shape)

TITLES: dict[Shape, str] = {
    "text": "texts",
    "messages": "conversations",
    "sharegpt": "ShareGPT conversations",
    "alpaca": "Alpaca instructions",
    "completion": "prompts with completions",
}

CONVERSATIONS = (
    "messages",
    "conversations",
    "conversation",
    "dialog",
    "dialogue",
    "dialogs",
    "chat",
    "turns",
)

USED: dict[Shape, tuple[str, ...]] = {
    "text": ("text", "title"),
    "messages": (*CONVERSATIONS, "system", "tools", "functions"),
    "sharegpt": (*CONVERSATIONS, "system", "tools", "functions"),
    "alpaca": ("instruction", "input", "output", "system", "history"),
    "completion": ("prompt", "completion", "tools", "functions"),
}
NEEDED: dict[str, tuple[str, ...]] = {  # of conversations one of their keys
    "text": ("text",),
    "alpaca": ("instruction", "output"),
    "completion": ("prompt", "completion"),
}
# What `data.columns` may name, besides `role` and `content` within messages.
COLUMNS = (
    *("text", "title", "messages", "tools", "system", "prompt", "completion"),
    *("instruction", "input", "output", "history"),
)
MESSAGE_COLUMNS = ("role", "content")

# Says something to the model, or says what is trained on.
CONTENT = frozenset(
    {key for keys in USED.values() for key in keys if key != "title"}
    | {"chosen", "rejected", "label", "labels", "reward", "completions"}
    | {"question", "answer", "answers", "response", "responses", "query", "context", "target"}
    | {"system_prompt", "system_message", "developer", "documents", "tool_calls", "tool_choice"}
    | {"images", "image", "audio", "audios", "video", "videos", "reasoning", "reasoning_content"}
    | {"thinking", "thought", "rationale", "chain_of_thought", "chat_template"}
    | {"chat_template_kwargs", "enable_thinking", "weight", "weights", "loss_weight", "train"}
    | {"mask", "loss_mask", "input_ids", "attention_mask", "token_ids"}
    | {"prefix", "suffix", "few_shot", "content", "body", "passage", "solution"}
    | {"kto_tag", "training", "train_detail"}
)
# Of these, 0 and false say something too: that a row is not to be trained on, or is a bad one.
_MARKS = frozenset(
    {"label", "labels", "reward", "weight", "weights", "loss_weight", "train", "training", "mask"}
    | {"loss_mask", "enable_thinking", "kto_tag"}
)
_OF_TRAINING = frozenset({"weight", "loss_weight", "train", "training"})  # 1 says what holds anyway

_WRAPPERS = ("data", "rows", "examples", "instances", "items", "records", "dataset", "train")


@dataclass(frozen=True, slots=True)
class FoundShape:
    """The shape of a row and the reason; `named` lists the keys for a sentence."""

    shape: Shape
    named: str


def shapes_of(values: Mapping[str, Any], role: str | None = None) -> list[FoundShape]:
    """Return the shapes whose keys a row has; several where the row could be read in two ways.

    `role` is the key of the role within messages, where the configuration names it.
    """
    found: list[FoundShape] = []
    for key in CONVERSATIONS:
        if values.get(key) == []:
            found.append(FoundShape("messages", f"`{key}`, which is empty"))
        elif (way := way_of(parsed_turns(values.get(key)), role)) is not None:
            shape: Shape = "sharegpt" if way[0] == "sharegpt" else "messages"
            found.append(FoundShape(shape, f"`{key}` with {way[1]}"))
    if "instruction" in values and "output" in values:
        found.append(FoundShape("alpaca", "`instruction` and `output`"))
    if "prompt" in values and "completion" in values:
        found.append(FoundShape("completion", "`prompt` and `completion`"))
    if isinstance(values.get("text"), str | None) and "text" in values:
        named = "`title` and `text`" if "title" in values else "`text`"
        found.append(FoundShape("text", named))
    return found


def has_keys(shape: Shape, values: Mapping[str, Any]) -> bool:
    """Tell whether a row has the keys that a shape needs."""
    if shape in NEEDED:
        return all(key in values for key in NEEDED[shape])
    return any(key in values for key in CONVERSATIONS)


def says_something(key: str, value: Any, content: frozenset[str] = CONTENT) -> bool:
    """Tell whether a key says something to the model, or about what is trained on."""
    if key not in content or (isinstance(value, str | list | dict) and not value):
        return False
    if isinstance(value, bool | int | float):
        if key in _OF_TRAINING and value == 1:
            return False
        # `turns: 4` counts them; `images: false` says that there are none
        return key in _MARKS or not (value is False or key in CONVERSATIONS)
    return True


def preference_of(values: Mapping[str, Any]) -> str | None:
    """Name the keys of a row that compares answers; None if it does not."""
    if "chosen" in values and "rejected" in values:
        return "prompt, chosen, rejected" if "prompt" in values else "chosen, rejected"
    if "completion" in values and isinstance(values.get("label"), bool):
        return "completion, label"
    if isinstance(values.get("kto_tag"), bool):
        return "kto_tag"
    return None


def advice_for(values: Mapping[str, Any], setting: str = "") -> str:
    """Suggest a change that makes a row readable whose keys show no shape; `setting`: one that
    does, for these keys."""
    if (told := _of_lists(values) or _of_kinds(values)) is not None:
        return told
    return (
        "it must have `text`, `messages`, `conversations`, `prompt` and `completion`, or "
        "`instruction` and `output`; say which column is which with data.columns, such as "
        + (setting or "data.columns={prompt: ..., completion: ...}")
    )


def _of_lists(values: Mapping[str, Any]) -> str | None:
    """Suggest how a key with a list of objects is read, if there is one."""
    for key, value in values.items():
        turns = parsed_turns(value)
        first = turns[0] if turns else None
        if not isinstance(first, dict):
            continue
        inner = ", ".join(list(first)[:4])
        cased = {name.lower(): name for name in first}
        parts = f"role: {cased.get('role', '...')}, content: {cased.get('content', '...')}"
        if key in CONVERSATIONS:
            return (
                f"message 1 of `{key}` has no `role` (its keys: {inner}): each needs `role` and "
                f"`content`; if they have other names, set data.columns: {{{parts}}}"
            )
        if key in _WRAPPERS and (found := shapes_of(first)):
            return (
                f"the rows seem to be within `{key}` ({found[0].named}): make a file of that list "
                f"alone, for example with `jq -c '.{key}[]'` and the name .jsonl"
            )
        return (
            f"if `{key}` holds messages (their keys: {inner}), set data.columns: "
            f"{{messages: {key}, {parts}}}"
        )
    return None


def _of_kinds(values: Mapping[str, Any]) -> str | None:
    """Name a known key whose value is of a kind that it cannot be."""
    for key in (*CONVERSATIONS, "text"):
        value = values.get(key)
        if value is None or (key == "text" and isinstance(value, str)):
            continue
        if key == "text":
            return f"`text` is {kind_of(value)}, and it must be a string"
        if isinstance(value, str) and value.lstrip().startswith("["):
            return (
                f"`{key}` is a string that is no JSON, as pandas and datasets write lists into "
                "tables: write the rows as .jsonl or .parquet"
            )
        return f"`{key}` is {kind_of(value)}, and it must be a list of messages"
    return None
