"""Text of others made fit for a terminal: nothing in it moves the cursor, colours or hides.

Whoever writes a journal, a model's folder or a process's name chooses that text; an escape sequence
in it would be obeyed by the terminal of whoever watches.
"""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec

Kind = TypeVar("Kind", bound=msgspec.Struct)
UNPRINTABLE = "\N{REPLACEMENT CHARACTER}"


def printable(text: str) -> str:
    """`text` in one line, character by character: other white space is a space, the rest a mark.

    Lone surrogates, which no terminal can be sent, and marks of direction are unprintable too.
    """
    if text.isprintable():
        return text
    return "".join(map(_shown, text))


def printable_lines(text: str) -> str:
    """As `printable`, but lines stay lines."""
    return "\n".join(map(printable, text.split("\n")))


def is_plain(line: bytes) -> bool:
    """Whether a frame can hold no text that `printable` would change: ASCII without an escape."""
    return b"\\" not in line and b"\x7f" not in line and line.isascii()


def printable_texts(event: Kind) -> Kind:
    """The event with every text in it printable; the same one where they all are."""
    changed: Kind = _cleaned(event)
    return changed


def _shown(character: str) -> str:
    if character.isprintable():
        return character
    return " " if character.isspace() else UNPRINTABLE


def _cleaned(value: Any) -> Any:
    """`value` itself where nothing in it changes."""
    if isinstance(value, str):
        return printable(value)
    if isinstance(value, msgspec.Struct):
        parts = {name: getattr(value, name) for name in value.__struct_fields__}
        changed = {name: new for name, old in parts.items() if (new := _cleaned(old)) is not old}
        return msgspec.structs.replace(value, **changed) if changed else value
    if isinstance(value, dict):
        pairs = [(_cleaned(key), _cleaned(item), key, item) for key, item in value.items()]
        same = all(new is key and part is item for new, part, key, item in pairs)
        return value if same else {new: part for new, part, _, _ in pairs}
    if isinstance(value, list | tuple):
        items = [_cleaned(item) for item in value]
        same = all(new is old for new, old in zip(items, value, strict=True))
        return value if same else type(value)(items)
    return value
