"""Pages of lists, newest first, as the SDK reads them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any


def page(
    rows: Sequence[Any], limit: int, shown: Callable[[Any], Any] = lambda row: row
) -> dict[str, Any]:
    """Return the first `limit` of `rows`, each through `shown`; one row more means that more
    exist."""
    data = [shown(row) for row in rows[:limit]]
    return {
        "object": "list",
        "data": data,
        "has_more": len(rows) > limit,
        "first_id": data[0]["id"] if data else None,
        "last_id": data[-1]["id"] if data else None,
    }
