"""The ways in which files write the turns of a conversation, and one list of messages for all."""

from __future__ import annotations

import json
from typing import Any, Literal

from fluxtrain.data.containers.record import keys_of, kind_of
from fluxtrain.data.shapes.refused import RowRefused

Way = Literal["messages", "sharegpt", "texts", "pairs"]

# Keys of a question and its answer in one object, as Capybara and others have them.
PAIRS = (
    ("input", "output"),
    ("user", "assistant"),
    ("human", "assistant"),
    ("human", "gpt"),
    ("question", "answer"),
    ("prompt", "response"),
    ("prompt", "completion"),
    ("query", "response"),
    ("instruction", "response"),
    ("instruction", "output"),
)


def parsed_turns(value: Any) -> list[Any]:
    """Return the turns of a column: a list, one as JSON text, or an object of equally long lists.

    [] where it is none of them.
    """
    if isinstance(value, str) and value.lstrip().startswith("["):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            return []
    if isinstance(value, dict):
        value = rows_of_columns(value)
    return list(value) if isinstance(value, list) else []


def rows_of_columns(value: dict[str, Any]) -> Any:
    """Return a list of objects for an object of lists, as `datasets.Sequence` stores them."""
    columns = list(value.values())
    if not columns or not all(isinstance(column, list) for column in columns):
        return value
    if len({len(column) for column in columns}) != 1:
        return value
    return [dict(zip(value, cells, strict=True)) for cells in zip(*columns, strict=True)]


def way_of(turns: list[Any], role: str | None = None) -> tuple[Way, str] | None:
    """Tell how turns are written by the first one, and name it for a sentence; None: unknown.

    `role` is the key of the role, where the configuration names it.
    """
    first = turns[0] if turns else None
    if isinstance(first, str):
        return "texts", "a list of texts, the user's first"
    if isinstance(first, list) and len(first) == 2 and all(isinstance(one, str) for one in first):
        return "pairs", "a list of [question, answer]"
    if not isinstance(first, dict):
        return None
    if (role or "role") in first:
        return "messages", f"`{role}`" if role else "`role` and `content`"
    if "from" in first:
        return "sharegpt", "`from` and `value`"
    if (pair := _pair_of(first)) is not None:
        return "pairs", f"`{pair[0]}` and `{pair[1]}`"
    return None


def messages_of(turns: list[Any], role: str, content: str) -> list[Any]:
    """Return turns of texts or of pairs as messages with the keys `role` and `content`.

    Turns that are messages already are returned as they are. Raises RowRefused where a turn is
    written in another way than the first one.
    """
    way = way_of(turns, role)
    if way is None or way[0] not in ("texts", "pairs"):
        return turns
    made: list[Any] = []
    for number, turn in enumerate(turns, start=1):
        if (found := way_of([turn], role)) is None or found[0] != way[0]:
            named = kind_of(turn)
            raise RowRefused(
                f", turn {number} is {named + ', and it must be ' if turn is None else 'not '}"
                f"written as the first one ({way[1]})"
                + (f": its keys are {keys_of(turn)}" if isinstance(turn, dict) else "")
            )
        if isinstance(turn, str):
            made.append({role: "assistant" if number % 2 == 0 else "user", content: turn})
            continue
        asked, answered, rest = _parts(turn)
        made.append({role: "user", content: asked})
        made.append({role: "assistant", content: answered, **rest})
    return made


def _parts(turn: Any) -> tuple[Any, Any, dict[str, Any]]:
    """Return the question, the answer and the further keys of a pair."""
    if isinstance(turn, list):
        return turn[0], turn[1], {}
    pair = _pair_of(turn)
    assert pair is not None
    rest = {key: value for key, value in turn.items() if key not in pair}
    return turn[pair[0]], turn[pair[1]], rest


def _pair_of(turn: dict[str, Any]) -> tuple[str, str] | None:
    return next(
        (
            pair
            for pair in PAIRS
            if isinstance(turn.get(pair[0]), str) and isinstance(turn.get(pair[1]), str)
        ),
        None,
    )
