"""Makes foreign text safe for a terminal: nothing in it moves the cursor, colours or hides.

Journals, model folders and process names come from anywhere; the terminal that shows them would
obey an escape sequence in them.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:  # every command prints, and few read a journal
    import msgspec

    Kind = TypeVar("Kind", bound=msgspec.Struct)
UNPRINTABLE = "\N{REPLACEMENT CHARACTER}"


def printable(text: str) -> str:
    """Return `text` in one line: white space becomes a space, an unprintable character a mark.

    Lone surrogates, which no terminal accepts, and marks of direction count as unprintable.
    """
    if text.isprintable():
        return text
    return "".join(map(_shown, text))


def printable_lines(text: str) -> str:
    """Convert as `printable` does, but keep line ends."""
    return "\n".join(map(printable, text.split("\n")))


def quoted(text: str) -> str:
    """Return a text in quotes, in one line; quotes and line ends within it are escaped."""
    return json.dumps(printable_lines(text), ensure_ascii=False)


def is_plain(line: bytes) -> bool:
    """Return whether `printable` would change nothing in a frame: it is ASCII without an escape."""
    return b"\\" not in line and b"\x7f" not in line and line.isascii()


def printable_texts(event: Kind) -> Kind:
    """Make every text of the event printable; return the same event if all are."""
    changed: Kind = _cleaned(event)
    return changed


def _shown(character: str) -> str:
    if character.isprintable():
        return character
    return " " if character.isspace() else UNPRINTABLE


def _cleaned(value: Any) -> Any:
    """Make every text in `value` printable; return `value` itself if nothing changes."""
    if isinstance(value, str):
        return printable(value)
    if hasattr(value, "__struct_fields__"):  # one of msgspec's
        import msgspec

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
