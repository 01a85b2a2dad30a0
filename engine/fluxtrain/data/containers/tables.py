"""Reads tables of text: .csv and .tsv, whose first line names the columns."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from itertools import chain

from fluxtrain.data.containers.lines import text_lines
from fluxtrain.data.containers.record import Problem, Record
from fluxtrain.data.containers.streams import Source
from fluxtrain.data.row import Origin
from fluxtrain.errors import BadInput

FIELD_LIMIT_CHARACTERS = 64 << 20
DELIMITERS = {"csv": ",;\t|", "tsv": "\t"}  # the one that occurs most in the header is taken


def table_rows(source: Source, kind: str) -> Iterator[Record | Problem]:
    """Yield one record a row, with the columns' names as keys; an empty cell is left out.

    Raises BadInput where columns have no name or the same one, or a quote is never closed.
    """
    text = (line.text for line in text_lines(source))
    header = next(text, "")
    delimiter = max(DELIMITERS[kind], key=header.count)
    csv.field_size_limit(FIELD_LIMIT_CHARACTERS)  # of the process: the module knows no other
    reader = csv.reader(chain([header], text), delimiter=delimiter, strict=True)
    try:
        names = _checked_names(source, next(reader, []))
        while True:
            begins = reader.line_num + 1
            cells = next(reader, None)
            if cells is None:
                return
            if cells:  # a blank line has none
                yield _record(names, cells, Origin(source.name, begins))
    except csv.Error as error:
        raise BadInput(
            f"{source.name} cannot be read behind line {reader.line_num}: {error}; a quote that is "
            'opened must be closed, and one inside of a cell is written twice ("")'
        ) from error


def _checked_names(source: Source, names: list[str]) -> list[str]:
    names = [name.strip() for name in names]
    if not all(names):
        raise BadInput(
            f"{source.name}: column {names.index('') + 1 if names else 1} has no name: the first "
            "line must name every column, such as prompt,completion"
        )
    doubled = next((name for name in names if names.count(name) > 1), None)
    if doubled is not None:
        raise BadInput(f"{source.name} has two columns {doubled!r}: rename or remove one of them")
    return names


def _record(names: list[str], cells: list[str], origin: Origin) -> Record | Problem:
    if len(cells) != len(names):
        return Problem(
            origin,
            f" has {len(cells)} cells and the first line names {len(names)} columns: quote cells "
            "that hold the delimiter",
        )
    return Record(origin, {name: cell for name, cell in zip(names, cells, strict=True) if cell})
