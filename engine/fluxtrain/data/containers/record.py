"""What a container yields: records with their keys, and rows that cannot be read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fluxtrain.data.row import Origin


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


def keys_of(values: dict[str, Any]) -> str:
    """List the first keys for a message."""
    shown = ", ".join(list(values)[:12]) or "none"
    return shown + (", ..." if len(values) > 12 else "")
