"""One file of a corpus: its container, its shape with the reason, and how its rows are opened."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

from fluxtrain.data.containers.lines import LINE_LIMIT_BYTES
from fluxtrain.data.containers.opening import Opened, container_of, records
from fluxtrain.data.containers.record import Problem, Record
from fluxtrain.data.containers.streams import Source, compression_of
from fluxtrain.data.containers.texts import texts
from fluxtrain.data.row import Row
from fluxtrain.data.shapes.convert import (
    KeyRules,
    Recognised,
    recognised,
    recognised_by_columns,
    renamed,
)
from fluxtrain.data.shapes.keys import SHAPES, Shape, shapes_of
from fluxtrain.errors import BadInput

PLAIN = "plain"  # as data.format: the file is plain text, whatever its name says
FORMATS = ("auto", *SHAPES, PLAIN)
LOOKED_AT = 64  # rows among which one must show the shape of its file

_NEVER_PLAIN = ("csv", "tsv", "parquet", "arrow")


class Items(Protocol):
    """The content of a part, from its beginning; a context manager."""

    @property
    def share(self) -> float:
        """Return the fraction of the part read so far."""

    def __enter__(self) -> Items: ...
    def __exit__(self, *_: object) -> None: ...
    def __iter__(self) -> Iterator[Row | Record | Problem]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One file, or one split of a data set on the hub."""

    name: str
    container: str
    shape: Shape
    because: str
    open: Callable[[], Items]
    size_bytes: int
    weight: float = 1.0  # how often an epoch draws each row
    rules: KeyRules = field(default_factory=KeyRules)
    open_at: Callable[[int], Items] | None = None  # behind so many bytes, where that is cheap
    has_end: bool = True  # False: how much it holds is not known before it was read


class _FileItems:
    def __init__(self, path: Path, opened: Opened, offset: int = 0) -> None:
        self._source = Source(path)
        self._opened = opened
        if offset:
            self._source.jump(offset)

    def __enter__(self) -> _FileItems:
        return self

    def __exit__(self, *_: object) -> None:
        self._source.__exit__()

    @property
    def share(self) -> float:
        return self._source.share

    def __iter__(self) -> Iterator[Row | Record | Problem]:
        if self._opened.container == "text":
            return texts(self._source)
        return records(self._source, self._opened.container)


def file_part(path: Path, rules: KeyRules, weight: float = 1.0) -> Part:
    """Look at a file, and return how it is read. Raises BadInput if it cannot be."""
    opened = _opened(path, rules)
    part = Part(
        name=str(path),
        container=opened.container,
        shape="text",
        because=opened.because,
        open=lambda: _FileItems(path, opened),
        size_bytes=path.stat().st_size,
        weight=weight,
        rules=rules,
        open_at=partial(_FileItems, path, opened) if _can_jump(path, opened) else None,
    )
    if opened.container != "text":
        return with_shape(part)
    if rules.shape == "auto":
        _refuse_rows_named_as_text(path)
    return part


def _can_jump(path: Path, opened: Opened) -> bool:
    """Return whether reading may begin in the middle: rows of JSON end with a line, packed files
    have no such place."""
    return opened.container == "json lines" and compression_of(path) is None


def _refuse_rows_named_as_text(path: Path) -> None:
    """Raise BadInput if a text file begins with a row, whose marks would be trained on as text."""
    with Source(path) as source:
        line = source.readline(LINE_LIMIT_BYTES).strip()
    if not line.startswith(b"{"):
        return
    try:
        values = json.loads(line)
    except (ValueError, RecursionError):
        return
    if isinstance(values, dict) and (found := shapes_of(values)):
        raise BadInput(
            f"{path} is named as text, and its first line is an object with {found[0].named}: "
            "rename it to .jsonl, or set data.format: plain to learn the text of its lines as it is"
        )


def with_shape(part: Part) -> Part:
    """Return the part with the shape that its first rows show. Raises BadInput if they do not."""
    shown = _shown(part)
    because = f"{part.because}, and {shown.because}" if part.because else shown.because
    rules = replace(part.rules, columns=shown.columns) if shown.columns else part.rules
    return replace(part, shape=shown.shape, because=because, rules=rules)


def _shown(part: Part) -> Recognised:
    first: Record | None = None
    problem: Problem | None = None
    values: dict[str, Any] = {}  # of each key of the first rows: tables leave out empty cells
    with part.open() as items:
        for item in islice(items, LOOKED_AT):
            if isinstance(item, Problem):
                problem = problem or item
            elif isinstance(item, Record):
                if (shown := recognised(item, part.rules)) is not None:
                    return shown
                first = first or item
                values |= {
                    k: v for k, v in renamed(item.values, part.rules).items() if k not in values
                }
    if first is not None:
        return recognised_by_columns(first, values, part.rules)
    if problem is not None:
        raise BadInput(str(problem))
    if part.container in ("csv", "tsv"):
        raise BadInput(f"{part.name} names its columns and has no rows: there is nothing to learn")
    raise BadInput(f"{part.name} is empty: there is nothing to train on")


def _opened(path: Path, rules: KeyRules) -> Opened:
    if rules.shape not in FORMATS:
        raise BadInput(f"data.format {rules.shape!r} is not one of {', '.join(FORMATS)}")
    opened = container_of(path)
    if rules.shape != PLAIN:
        if opened.container == "text" and rules.shape not in ("auto", "text"):
            raise BadInput(
                f"{path} is plain text ({opened.because}), and data.format is {rules.shape}: "
                "rows with keys are .jsonl, .json, .csv, .tsv, .parquet or .arrow"
            )
        return opened
    if opened.container in _NEVER_PLAIN:
        raise BadInput(
            f"{path} is {opened.container}, which is never read as plain text: leave out "
            "data.format, or set data.columns: {text: the column to learn}"
        )
    return Opened("text", "data.format says so")
