"""The refusal of one row, and small checks of values that raise it."""

from __future__ import annotations

import json
from typing import Any

from fluxtrain.data.containers.record import kind_of


class RowRefused(Exception):
    """A row cannot be used; the text follows the row's origin in a sentence."""


def string_of(value: Any, name: str) -> str:
    """Return a string. Raises RowRefused for any other kind."""
    if not isinstance(value, str):
        raise RowRefused(f": `{name}` is {kind_of(value)}, and it must be a string")
    return value


def filled_string(value: Any, name: str, why: str) -> str:
    """Return a string that is not blank. Raises RowRefused with the reason why it must not be."""
    text = string_of(value, name)
    if not text.strip():
        raise RowRefused(f": `{name}` is blank, so {why}: fill it or remove the row")
    return text


def list_of(value: Any, name: str) -> list[Any]:
    """Return a list, which a table or a column of text may hold as JSON. Raises RowRefused."""
    found = from_json(value, name) if isinstance(value, str) else value
    if not isinstance(found, list):
        raise RowRefused(f": `{name}` is {kind_of(value)}, and it must be a list")
    return found


def from_json(text: str, name: str) -> Any:
    """Parse a value that is JSON in a string. Raises RowRefused."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        told = error.msg if isinstance(error, json.JSONDecodeError) else "it cannot be parsed"
        raise RowRefused(f": `{name}` is a string that is not JSON ({told})") from error
