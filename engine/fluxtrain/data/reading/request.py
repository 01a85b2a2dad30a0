"""The reading half of the `data` section of a configuration, and the corpora that it means."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from fluxtrain.data.reading.corpus import Corpus, corpus_of
from fluxtrain.data.reading.files import Entry
from fluxtrain.data.shapes.convert import KeyRules
from fluxtrain.errors import BadInput

DEMO = "demo"
MOST_WEIGHT = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadRequest:
    """The data to read, and how, by the configuration."""

    entries: tuple[Entry, ...]
    held_out: tuple[Entry, ...] = ()  # empty: a share of the rows is held out
    max_bad_rows: int = 0

    @property
    def is_demo(self) -> bool:
        """Tell whether the demo's text is meant."""
        return len(self.entries) == 1 and self.entries[0].path == DEMO

    def corpus(self) -> Corpus:
        """Look at the files to train on. Raises BadInput for the first that cannot be used."""
        return corpus_of(self.entries, self.max_bad_rows)

    def held_out_corpus(self) -> Corpus | None:
        """Look at the files to evaluate on; None where they are a share of the others."""
        if not self.held_out:
            return None
        return corpus_of(self.held_out, self.max_bad_rows, "data.held_out_path")


def read_request(data: Mapping[str, Any]) -> ReadRequest:
    """Return the request of a plain `data` section; missing keys have the defaults."""
    rules = KeyRules(
        shape=data.get("format") or "auto",
        columns=dict(data.get("columns") or {}),
        roles=dict(data.get("roles") or {}),
        ignore=tuple(data.get("ignore") or ()),
    )
    return ReadRequest(
        entries=_entries(data.get("path") or DEMO, rules),
        held_out=_entries(data.get("held_out_path") or (), rules),
        max_bad_rows=int(data.get("max_bad_rows") or 0),
    )


def _entries(path: Any, rules: KeyRules) -> tuple[Entry, ...]:
    listed: Sequence[Any] = path if isinstance(path, list | tuple) else [path]
    return tuple(_entry(one, rules) for one in listed)


def _entry(one: Any, rules: KeyRules) -> Entry:
    if isinstance(one, str):
        return Entry(path=one, rules=rules)
    if not isinstance(one, Mapping) or not isinstance(one.get("path"), str):
        raise BadInput(f"data.path lists {one!r:.60}: write a path, or {{path: ..., weight: ...}}")
    own = replace(
        rules,
        shape=one.get("format") or rules.shape,
        columns=dict(one["columns"]) if one.get("columns") else rules.columns,
    )
    weight = float(one.get("weight", 1.0))
    if not 0 < weight <= MOST_WEIGHT:  # NaN is neither
        raise BadInput(
            f"data.path gives {one['path']} the weight {weight:g}, and it is above 0 and at most "
            f"{MOST_WEIGHT}"
        )
    return Entry(
        path=one["path"],
        weight=weight,
        configuration=one.get("configuration"),
        split=one.get("split"),
        rules=own,
    )
