"""Writes the numbers of a panel or a screen as CSV, with units in the names of columns."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict as fields_of
from typing import Any

from msgspec.structs import asdict

from fluxtrain.events.events import Event
from fluxtui.panels.block import bytes_of, name_of
from fluxtui.panels.card_colours import card_of
from fluxtui.panels.lanes import shown
from fluxtui.state.history import Curve, History
from fluxtui.state.run import FoldedRun
from fluxtui.state.view import View

Row = Mapping[str, Any]

_LEFT_OUT = ("seq", "t_s", "dropped")


def csv_of(name: str, view: View) -> str:
    """Return the numbers of a panel or a screen as CSV; the steps' numbers if it has none."""
    return _written(_TABLES.get(name, _steps)(view))


def rows_held(name: str, view: View) -> str:
    """Say how many rows a table has if the app dropped older ones; else ""."""
    if name in _TABLES and name not in _HISTORIES:
        return ""
    history = _HISTORIES[name](view.state) if name in _HISTORIES else view.state.steps
    if history.total == len(history):
        return ""
    return f"the newest {len(history)} of {history.total} rows; the run's events.ndjson has all"


def _steps(view: View) -> Iterable[Row]:
    return _events(view.state.steps)


def _events(events: Iterable[Event]) -> Iterable[Row]:
    for event in events:
        yield dict(_flat(asdict(event)))


def _flat(fields: Mapping[str, Any]) -> Iterable[tuple[str, Any]]:
    for name, value in fields.items():
        if isinstance(value, Mapping):
            yield from ((f"{name}.{part}", number) for part, number in value.items())
        elif name == "cards" and isinstance(value, tuple):
            for card in value:  # a column for each number of each card
                own = _flat({part: what for part, what in asdict(card).items() if part != "number"})
                yield from ((f"card{card.number}.{part}", number) for part, number in own)
        elif name not in _LEFT_OUT:
            yield name, value


def _loss(view: View) -> Iterable[Row]:
    """Return the whole run's loss, with the evaluations at their steps."""
    evaluations = dict(view.state.evaluations)
    for row in _curve(view.state.loss, "loss"):
        steps = range(row["first_step"], row["last_step"] + 1)
        found = next((evaluations[step] for step in steps if step in evaluations), None)
        yield {**row, "evaluation_loss": found}


def _curve(curve: Curve, name: str) -> Iterable[dict[str, Any]]:
    """Return each point of a curve: one step, or the mean of several steps in a long run."""
    for bucket in curve.buckets:
        yield {
            "first_step": bucket.first, "last_step": bucket.last, f"{name}_mean": bucket.mean,
            f"{name}_low": bucket.low, f"{name}_high": bucket.high, f"{name}_ema": bucket.smooth,
        }  # fmt: skip


def _blocks(view: View) -> Iterable[Row]:
    sample = view.state.residency
    if sample is None:
        return
    for at, weights in enumerate(sample.weights):
        sizes = bytes_of(sample, at)
        yield {
            "block": at, "name": name_of(sample, at), "weights": weights,
            "gradients": sample.gradients[at : at + 1], "optimizer": sample.optimizer[at : at + 1],
            "weights_bytes": sizes[0], "gradients_bytes": sizes[1], "optimizer_bytes": sizes[2],
            **({"card": card_of(sample.cards[at])} if at < len(sample.cards) else {}),
        }  # fmt: skip


def _lanes(view: View) -> Iterable[Row]:
    """Return the intervals of the step on screen."""
    found = shown(view)
    if isinstance(found, str):
        return
    for one in found.lanes.intervals:
        yield {
            "step": found.head.step, "lane": one.lane, "kind": one.kind, "block": one.name,
            "start_s": one.start_s, "duration_s": one.duration_s, "merged": one.pieces - 1,
            **({"card": one.card} if found.lanes.cards > 1 else {}),
        }  # fmt: skip


def _machine(view: View) -> Iterable[Row]:
    if view.machine is not None:
        facts = fields_of(view.machine)
        for gpu in facts.pop("gpus"):
            at = f"gpu{gpu.pop('index')}"
            del gpu["processes"]
            held_by = gpu["throttled_by"]
            gpu["throttled_by"] = None if held_by is None else ", ".join(held_by) or "nothing"
            facts |= {f"{at}.{name}": value for name, value in gpu.items()}
        yield facts


def _log(view: View) -> Iterable[Row]:
    for one in view.state.log:
        yield {"wall_s": one.wall_s, "level": one.level, "kind": one.kind, "text": one.text}


def _choices(state: FoldedRun) -> Iterable[Row]:
    return (asdict(choice) for choice in state.planned.choices) if state.planned else ()


_HISTORIES: dict[str, Callable[[FoldedRun], History[Any]]] = {
    "memory": lambda state: state.memories,
    "cards": lambda state: state.memories,
    "card_memory": lambda state: state.memories,
    "memory_history": lambda state: state.memories,
    "categories": lambda state: state.memories,
    "transfer": lambda state: state.traffics,
    "bus": lambda state: state.traffics,
    "rates": lambda state: state.traffics,
}
_TABLES: dict[str, Callable[[View], Iterable[Row]]] = {
    "loss": _loss,
    "grad_norm": lambda view: _curve(view.state.grad_norm, "grad_norm"),
    "learning_rate": lambda view: _curve(view.state.learning_rate, "learning_rate"),
    "memory": lambda view: _events(view.state.memories),
    "cards": lambda view: _events(view.state.memories),
    "card_memory": lambda view: _events(view.state.memories),
    "memory_history": lambda view: _events(view.state.memories),
    "categories": lambda view: _events(view.state.memories),
    "transfer": lambda view: _events(view.state.traffics),
    "bus": lambda view: _events(view.state.traffics),
    "rates": lambda view: _events(view.state.traffics),
    "lanes": _lanes,
    "moves": lambda view: (asdict(move) for move in view.state.moves),
    "residency": _blocks,
    "block": _blocks,
    "machine": _machine,
    "log": _log,
    "advice": lambda view: _events(view.state.advice),
    "plan": lambda view: _choices(view.state),
}


def _written(rows: Iterable[Row]) -> str:
    kept = list(rows)
    columns = list(dict.fromkeys(name for one in kept for name in one))
    out = io.StringIO()
    writer = csv.DictWriter(out, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows(kept)
    return out.getvalue()
