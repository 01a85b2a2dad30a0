"""Reads rows of JSON: one object a line, or the objects of one array, which is never loaded whole.

The standard library's decoder parses the array from a window of text that holds one object, so a
row may be as long as `ROW_LIMIT_CHARACTERS` and memory stays below a few times that.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterator
from typing import Any, Literal

from fluxtrain.data.containers.lines import TextLine, lines
from fluxtrain.data.containers.record import (
    DEPTH_LIMIT,
    Problem,
    Record,
    doubled_of,
    is_too_deep,
    kind_of,
)
from fluxtrain.data.containers.streams import Source
from fluxtrain.data.row import Origin
from fluxtrain.errors import BadInput
from fluxtrain.units import count_text

ROW_LIMIT_CHARACTERS = 64 << 20
WINDOW_BYTES = 1 << 20

_BLANKS = " \t\r\n"
_BLANK_RUN = re.compile(r"[ \t\r\n]*")
_TOKEN_CHARACTERS = 16  # an error so close to the window's end may be one of the window


_WRITTEN_AS: dict[type, str] = {
    list: ', such as {"messages": [...]}',
    str: ', such as {"text": ...}',
}


class _Parser:
    """Decodes JSON and notices a key that stands twice in one object."""

    def __init__(self) -> None:
        self._doubled: str | None = None
        self._decoder = json.JSONDecoder(object_pairs_hook=self._object)

    def decode(self, text: str, start: int) -> tuple[Any, int]:
        """Return the value that begins at `start`, and where it ends. Raises ValueError."""
        self._doubled = None
        return self._decoder.raw_decode(text, start)

    def record(self, value: Any, text: str, origin: Origin) -> Record | Problem:
        """Return the row that was decoded last, from `text`."""
        if not isinstance(value, dict):
            such = _WRITTEN_AS.get(type(value), "")
            return Problem(
                origin, f" is {kind_of(value)}, and each row must be a JSON object{such}"
            )
        if self._doubled is not None:
            return Problem(
                origin,
                f" has the key {self._doubled!r} twice in one object: remove one of the two",
            )
        if text.count("{") + text.count("[") > DEPTH_LIMIT and is_too_deep(value):
            return Problem(origin, ": its JSON is nested too deeply")
        if "\\ud" in text or "\\uD" in text:
            try:
                json.dumps(value, ensure_ascii=False).encode()
            except UnicodeEncodeError as error:
                half = ascii(error.object[error.start])[1:-1]
                return Problem(
                    origin,
                    f" holds {half}, half of a pair that makes one character: a tool cut the text "
                    "between the two; remove it",
                )
        return Record(origin, value)

    def _object(self, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        made = dict(pairs)
        if len(made) < len(pairs):
            self._doubled = doubled_of(pairs)
        return made


def json_lines(source: Source) -> Iterator[Record | Problem]:
    """Yield one record a line; blank lines are passed over."""
    parser = _Parser()
    for line in lines(source):
        if isinstance(line, Problem):
            yield line
        elif line.text.strip():
            unit: Literal["line", "byte"] = "byte" if source.jumped else "line"
            yield _of_line(parser, line, Origin(source.name, line.number, unit))


def json_values(source: Source) -> Iterator[Record | Problem]:
    """Yield the objects of one array, or consecutive objects over several lines.

    Raises BadInput where the text is no JSON: the objects behind it cannot be found then.
    """
    window, parser = _Window(source), _Parser()
    number = 1
    in_array = window.taken("[")
    while not window.taken("]") if in_array else window.has_more():
        origin = Origin(source.name, number, "row")
        value, text = window.value(parser, origin)
        yield parser.record(value, text, origin)
        number += 1
        if in_array and not window.taken(",") and not window.next_is("]"):
            raise window.error(origin, "a comma or ] must follow")
    if in_array and window.has_more():
        raise BadInput(
            f"{source.name} goes on behind its array (line {window.line}): it must be one array, "
            "or one object a line"
        )


def _of_line(parser: _Parser, line: TextLine, origin: Origin) -> Record | Problem:
    text = line.text.strip(_BLANKS)
    try:
        value, end = parser.decode(text, 0)
        if end < len(text):
            raise json.JSONDecodeError("Extra data", text, end)
    except json.JSONDecodeError as error:
        return Problem(
            origin,
            f" is not JSON: {error.msg} at column {error.colno}; each line must be one whole JSON "
            "object",
        )
    except ValueError:
        return Problem(
            origin,
            " has a number of thousands of digits in it: take it out, or write it as a string",
        )
    except RecursionError:
        return Problem(origin, ": its JSON is nested too deeply")
    return parser.record(value, text, origin)


class _Window:
    """The text read ahead: as much of the file as the next value needs."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._decoder = codecs.getincrementaldecoder("utf-8-sig")()
        self._text = ""
        self._at = 0
        self._ended = False
        self.line = 1

    def has_more(self) -> bool:
        """Skip blanks; tell whether anything is left."""
        while True:
            blanks = _BLANK_RUN.match(self._text, self._at)
            self._skip(blanks.end() - self._at if blanks else 0)
            if self._at < len(self._text):
                return True
            if not self._fill():
                return False

    def next_is(self, mark: str) -> bool:
        """Tell whether `mark` follows, behind blanks."""
        return self.has_more() and self._text.startswith(mark, self._at)

    def taken(self, mark: str) -> bool:
        """Step over `mark` if it follows, behind blanks."""
        if not self.next_is(mark):
            return False
        self._skip(1)
        return True

    def value(self, parser: _Parser, origin: Origin) -> tuple[Any, str]:
        """Return the next value and its text. Raises BadInput where there is none."""
        if not self.has_more():
            raise self.error(origin, "the file ends here, and it is not complete")
        while True:
            try:
                value, end = parser.decode(self._text, self._at)
                # A number that ends with the window may go on behind it.
                if end < len(self._text) or not self._fill():
                    text = self._text[self._at : end]
                    self._skip(end - self._at)
                    return value, text
            except json.JSONDecodeError as error:
                if self._is_real(error) or not self._fill():
                    at = self.line + self._text.count("\n", self._at, error.pos)
                    told = f"{error.msg} at line {at}"
                    if self._ended and not self._is_real(error):
                        told += ", where the file ends"
                    raise self.error(origin, told) from error
            except ValueError as error:
                raise self.error(origin, "a number has thousands of digits") from error
            except RecursionError as error:
                raise self.error(origin, "it is nested too deeply") from error
            if len(self._text) - self._at > ROW_LIMIT_CHARACTERS:
                raise BadInput(
                    f"{origin} is longer than {count_text(ROW_LIMIT_CHARACTERS)} characters: "
                    "break it into several, or write one object a line (.jsonl)"
                )

    def error(self, origin: Origin, what: str) -> BadInput:
        """Return the refusal of text that is no JSON."""
        return BadInput(
            f"{origin} (line {self.line}) is not JSON: {what}; the file must be one array of "
            "objects, or one object a line"
        )

    def _is_real(self, error: json.JSONDecodeError) -> bool:
        """Return whether an error is the file's, or would go away with more text."""
        if error.msg.startswith("Unterminated string"):
            return False
        return error.pos < len(self._text) - _TOKEN_CHARACTERS

    def _skip(self, characters: int) -> None:
        self.line += self._text.count("\n", self._at, self._at + characters)
        self._at += characters

    def _fill(self) -> bool:
        """Read as much again as is held, so that long values are tried only a few times."""
        if self._ended:
            return False
        held = self._text[self._at :]
        data = self._source.read(max(WINDOW_BYTES, len(held)))
        self._ended = not data
        try:
            more = self._decoder.decode(data, final=self._ended)
        except UnicodeDecodeError as error:
            offset = self._source.at - len(data) + error.start
            raise BadInput(
                f"{self._source.name} is not UTF-8: a wrong byte at about offset {offset}; "
                "convert it, for example with `iconv -f LATIN1 -t UTF-8`"
            ) from error
        self._text, self._at = held + more, 0
        return True
