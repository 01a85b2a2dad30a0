"""What a screen shows as rows for other programs: CSV, units in the names of the columns."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Mapping
from typing import Any

from msgspec.structs import asdict

from fluxtrain.telemetry.events import Event
from fluxtui.state.run import RunState

_LEFT_OUT = ("seq", "t_s", "dropped")


def csv_of(screen: str, state: RunState) -> str:
    """The histories behind a screen: memory and transfer samples, the log, else the steps."""
    if screen == "memory":
        return _written(_rows(state.memories))
    if screen == "transfer":
        return _written(_rows(state.traffics))
    if screen == "log":
        return _written(
            {"wall_s": one.wall_s, "level": one.level, "kind": one.kind, "text": one.text}
            for one in state.log
        )
    return _written(_rows(state.steps))


def _rows(events: Iterable[Event]) -> Iterable[dict[str, Any]]:
    for event in events:
        yield dict(_flat(asdict(event)))


def _flat(fields: Mapping[str, Any]) -> Iterable[tuple[str, Any]]:
    for name, value in fields.items():
        if isinstance(value, Mapping):
            yield from ((f"{name}.{part}", number) for part, number in value.items())
        elif name not in _LEFT_OUT:
            yield name, value


def _written(rows: Iterable[Mapping[str, Any]]) -> str:
    kept = list(rows)
    columns = list(dict.fromkeys(name for one in kept for name in one))
    out = io.StringIO()
    writer = csv.DictWriter(out, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows(kept)
    return out.getvalue()
