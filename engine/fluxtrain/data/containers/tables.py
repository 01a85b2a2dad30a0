"""Reads tables of text: .csv and .tsv, whose first line names the columns."""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator
from itertools import chain

from fluxtrain.data.containers.lines import text_lines
from fluxtrain.data.containers.record import Problem, Record
from fluxtrain.data.containers.streams import Source
from fluxtrain.data.row import Origin
from fluxtrain.errors import BadInput

FIELD_LIMIT_CHARACTERS = 64 << 20
DELIMITERS = {"csv": ",;\t|", "tsv": "\t"}  # the one that occurs most in the header is taken

_HINT = re.compile(r"sep=(.)")  # Excel's first line, which names the delimiter


def table_rows(source: Source, kind: str) -> Iterator[Record | Problem]:
    """Yield one record a row, with the columns' names as keys; an empty cell is left out.

    Raises BadInput where columns have no name or the same one, or a quote is never closed.
    """
    text = (line.text for line in text_lines(source))
    header = next(text, "")
    told = _HINT.fullmatch(header.strip())
    delimiter = told[1] if told else max(DELIMITERS[kind], key=header.count)
    header = next(text, "") if told else header
    csv.field_size_limit(FIELD_LIMIT_CHARACTERS)  # of the process: the module knows no other
    reader = csv.reader(chain([header], text), delimiter=delimiter, strict=True)
    before = 1 if told else 0
    try:
        names = _checked_names(source, next(reader, []))
        while True:
            begins = reader.line_num + 1 + before
            cells = next(reader, None)
            if cells is None:
                return
            if cells:  # a blank line has none
                yield _record(names, cells, Origin(source.name, begins))
    except csv.Error as error:
        raise BadInput(
            f"{source.name} cannot be read behind line {reader.line_num + before}: {_cure(error)}"
        ) from error


def _cure(error: csv.Error) -> str:
    if "new-line character" in str(error):
        return (
            "a carriage return alone stands in a cell without quotes, as old Mac files end their "
            r"lines: convert it with `tr '\r' '\n'`"
        )
    return (
        f"{error}; a quote that is opened must be closed, and one inside of a cell is written "
        'twice ("")'
    )


def _checked_names(source: Source, names: list[str]) -> list[str]:
    if not any(name.strip() for name in names):
        raise BadInput(
            f"{source.name}: its columns have no names: the first line must name them, such as "
            "prompt,completion"
        )
    # pandas writes the numbers of the rows in front, and leaves their name empty
    names = [name.strip() or f"column {at}" for at, name in enumerate(names, start=1)]
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
