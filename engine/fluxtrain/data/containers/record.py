"""What a container yields: records with their keys, and rows that cannot be read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fluxtrain.data.row import Origin

DEPTH_LIMIT = 200  # objects and lists within each other


@dataclass(frozen=True, slots=True)
class Record:
    """One row of a file as the file gives it."""

    origin: Origin
    values: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Problem:
    """A row that cannot be used; the rows behind it still can.

    `said` follows the origin in a sentence, so it begins with a space or a colon.
    """

    origin: Origin
    said: str

    def __str__(self) -> str:
        return f"{self.origin}{self.said}"

    @property
    def short(self) -> str:
        """Return the sentence without the name of the file."""
        return f"{self.origin.unit} {self.origin.number}{self.said}"


def kind_of(value: Any) -> str:
    """Name a JSON value's kind for a message: "a list", "a number"."""
    names = {dict: "an object", list: "a list", str: "a string", bool: "a boolean"}
    if value is None:
        return "null or missing"
    if isinstance(value, bytes):
        return "binary"
    return names.get(type(value), "a number")


def is_too_deep(value: Any) -> bool:
    """Tell whether objects and lists lie in each other deeper than `DEPTH_LIMIT`."""
    level = [value]
    for _ in range(DEPTH_LIMIT + 1):
        level = [
            inner
            for outer in level
            if isinstance(outer, dict | list)
            for inner in (outer.values() if isinstance(outer, dict) else outer)
        ]
    return bool(level)


def doubled_of(pairs: list[tuple[str, Any]]) -> str:
    """Return the first key that stands twice among those of one object."""
    seen: set[str] = set()
    for name, _ in pairs:
        if name in seen:
            return name
        seen.add(name)
    raise ValueError("no key stands twice")


def keys_of(values: dict[str, Any]) -> str:
    """List the first keys for a message."""
    shown = ", ".join(list(values)[:12]) or "none"
    return shown + (", ..." if len(values) > 12 else "")
