"""The internal row: what every container and every shape of data becomes, and where it came from.

Reading makes rows, and everything after it (rendering, masks, packing) knows nothing else about the
data. Standard library only, so that the app can look at rows without loading torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

ROLES = ("system", "developer", "user", "assistant", "tool")

# A message in its normal form, as chat templates take it; a key that has no value is absent:
#   role               one of ROLES
#   content            a string (text parts are joined); None only with `tool_calls`
#   tool_calls         a list of {"type": "function", "id": string, "function": {"name": string,
#                      "arguments": object}}; `id` may be absent. Arguments are always a JSON
#                      object here, whatever the file holds: rendering turns them into a string
#                      where a template expects one.
#   tool_call_id, name strings
#   reasoning_content, reasoning, thinking   strings, under the name that the file gives them
Message = dict[str, Any]

# A tool in its normal form: {"type": "function", "function": {"name": ..., "parameters": ...}}.
Tool = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a row came from; its text form begins error messages."""

    file: str  # the path or the hub name
    number: int  # from 1; a byte counts from 0
    # row: of an array or of a table with columns; byte: of a line whose number is not known
    unit: Literal["line", "row", "byte"] = "line"

    def __str__(self) -> str:
        return f"{self.file} {self.unit} {self.number}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One text, or a piece of one, or one conversation.

    A long text is cut into several rows: `begins` tells that the document begins with this row (so
    the token that begins a sequence belongs in front), and `ends` that it ends with it (so its end
    is trained on). A row holds either `text` or `messages`.
    """

    origin: Origin
    text: str = ""
    begins: bool = True
    ends: bool = True
    messages: tuple[Message, ...] = ()
    weights: tuple[float, ...] = ()  # of each message: 1.0 is trained on, 0.0 is context
    tools: tuple[Tool, ...] = ()  # what the assistant may call in this conversation
    plain: bool = False  # a prompt and a completion without roles: see below

    # `plain`: the file gives two strings, so `messages` is one of the user and one of the
    # assistant. With a chat template they are rendered as such; without one the prompt and the
    # completion stand next to each other as they are, and the completion is trained on.

    @property
    def characters(self) -> int:
        """Return the length of the text, or of all messages."""
        return len(self.text) + sum(len(m.get("content") or "") for m in self.messages)


def weights_of(messages: tuple[Message, ...]) -> tuple[float, ...]:
    """Return which messages are trained on where the file gives no weights: the assistant's."""
    return tuple(float(message["role"] == "assistant") for message in messages)
