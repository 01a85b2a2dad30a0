"""The refusal of one row, and small checks of values that raise it."""

from __future__ import annotations

import json
import math
from typing import Any

from fluxtrain.data.containers.record import doubled_of, is_too_deep, kind_of


class RowRefused(Exception):
    """A row cannot be used; the text follows the row's origin in a sentence."""


def is_missing(value: Any) -> bool:
    """Tell a value that stands for none: null, and NaN, which pandas writes into empty cells."""
    return value is None or (isinstance(value, float) and math.isnan(value))


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
        found = json.loads(text, object_pairs_hook=_object)
    except (ValueError, RecursionError) as error:
        told = error.msg if isinstance(error, json.JSONDecodeError) else "it cannot be parsed"
        if isinstance(error, _Doubled):
            told = str(error)
        cure = "; single quotes are Python's: write it by json.dumps" * _is_python(text)
        raise RowRefused(f": `{name}` is a string that is not JSON ({told}{cure})") from error
    check_plain(found, name)
    return found


def check_plain(value: Any, name: str) -> None:
    """Raise RowRefused for a value that cannot be written as JSON: NaN, Infinity, half characters,
    objects within hundreds of others."""
    if is_too_deep(value):
        raise RowRefused(f": `{name}` is nested too deeply")
    try:
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except UnicodeEncodeError as error:
        half = ascii(error.object[error.start])[1:-1]
        raise RowRefused(
            f": `{name}` holds {half}, half of a pair that makes one character: remove it"
        ) from error
    except ValueError as error:
        raise RowRefused(
            f": `{name}` holds NaN or Infinity, which JSON does not know: write null or a number"
        ) from error


class _Doubled(ValueError):
    """A key stands twice in one object."""


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) < len(pairs):
        raise _Doubled(f"it has the key {doubled_of(pairs)!r} twice in one object")
    return made


def _is_python(text: str) -> bool:
    return text.lstrip("[ \n\t").startswith(("{'", '{"')) and "'" in text[:400]
