"""The keys of rows: which shape they make, and what becomes of the keys that a shape does not use.

Every key is used, refused, or counted. Refused is what plainly says or shows something to the
model, or says what is to be learnt: leaving it out in silence would train on something else than
the file means.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

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
# What `data.columns` may name, beside `role` and `content` within messages.
COLUMNS = (
    *("text", "title", "messages", "tools", "system", "prompt", "completion"),
    *("instruction", "input", "output", "history"),
)
MESSAGE_COLUMNS = ("role", "content")

# Says something to the model, or says what is learnt.
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
)

# Other names under which the columns of a prompt and its answer are published.
_PROMPTS = ("question", "query", "prompt", "input", "instruction", "source", "problem")
_ANSWERS = ("answer", "response", "output", "completion", "target", "solution", "chosen")
_TEXTS = (
    "text",
    "content",
    "body",
    "raw_content",
    "article",
    "document",
    "passage",
    "code",
    "story",
)


@dataclass(frozen=True, slots=True)
class Found:
    """The shape of a row and what told it; `named` lists the keys for a sentence."""

    shape: Shape
    named: str


def shapes_of(values: Mapping[str, Any], role: str | None = None) -> list[Found]:
    """Return the shapes whose keys a row has; several where the row could be read in two ways.

    `role` is the key of the role within messages, where the configuration names it.
    """
    found: list[Found] = []
    for key in CONVERSATIONS:
        shape = _conversation(values.get(key), role)
        if shape is not None:
            turn = f"`{role}`" if role else "`role` and `content`"
            turn = turn if shape == "messages" else "`from` and `value`"
            found.append(Found(shape, f"`{key}` with {turn}"))
    if "instruction" in values and "output" in values:
        found.append(Found("alpaca", "`instruction` and `output`"))
    if "prompt" in values and "completion" in values:
        found.append(Found("completion", "`prompt` and `completion`"))
    if isinstance(values.get("text"), str | None) and "text" in values:
        named = "`title` and `text`" if "title" in values else "`text`"
        found.append(Found("text", named))
    return found


def preference_of(values: Mapping[str, Any]) -> str | None:
    """Name the keys of a row that compares answers; None if it does not."""
    if "chosen" in values and "rejected" in values:
        return "prompt, chosen, rejected" if "prompt" in values else "chosen, rejected"
    if "completion" in values and isinstance(values.get("label"), bool):
        return "completion, label"
    return None


def advice_for(values: Mapping[str, Any]) -> str:
    """Suggest the setting that makes a row with other names readable."""
    prompt = _named(values, _PROMPTS)
    answer = _named(values, _ANSWERS)
    if "instruction" in values and answer is not None:
        further = ", input: context" if "context" in values else ""
        return (
            f"if `{answer}` answers `instruction`, set data.columns: {{output: {answer}{further}}}"
        )
    if prompt is not None and answer is not None:
        return (
            f"if `{answer}` answers `{prompt}`, set data.columns: "
            f"{{prompt: {prompt}, completion: {answer}}}"
        )
    turns = next((key for key, value in values.items() if _is_list_of_objects(value)), None)
    if turns is not None:
        inner = list(parsed_turns(values[turns])[0])[:4]
        if turns in CONVERSATIONS:
            return (
                f"message 1 of `{turns}` has no `role` (its keys: {', '.join(inner)}): each needs "
                "`role` and `content`; if they have other names, set data.columns: "
                "{role: ..., content: ...}"
            )
        return (
            f"if `{turns}` holds messages (their keys: {', '.join(inner)}), set data.columns: "
            f"{{messages: {turns}, role: ..., content: ...}}"
        )
    text = _named(values, _TEXTS)
    if text is not None:
        return f"if `{text}` is the whole text to learn, set data.columns: {{text: {text}}}"
    return (
        "it must have `text`, `messages`, `conversations`, `prompt` and `completion`, or "
        "`instruction` and `output`; data.columns says which column is which"
    )


def _named(values: Mapping[str, Any], names: tuple[str, ...]) -> str | None:
    """Return the key of a string that has one of these names, however it is capitalised."""
    there = {key.lower(): key for key, value in values.items() if isinstance(value, str)}
    return next((there[name] for name in names if name in there), None)


def parsed_turns(value: Any) -> list[Any]:
    """Return a list that columnar files and tables may hold as JSON text; [] if it is none."""
    if isinstance(value, str) and value.lstrip().startswith("["):
        import json

        try:
            value = json.loads(value)
        except ValueError:
            return []
    return list(value) if isinstance(value, list) else []


def _conversation(value: Any, role: str | None) -> Shape | None:
    turns = parsed_turns(value)
    first = turns[0] if turns else None
    if not isinstance(first, dict):
        return "messages" if value == [] else None
    if (role or "role") in first:
        return "messages"
    return "sharegpt" if "from" in first else None


def _is_list_of_objects(value: Any) -> bool:
    turns = parsed_turns(value)
    return bool(turns) and isinstance(turns[0], dict)
