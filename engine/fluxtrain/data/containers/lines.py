"""Reads the lines of a file as text, within a bound of memory; bad lines do not end the file."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from fluxtrain.data.containers.record import Problem
from fluxtrain.data.containers.streams import Source
from fluxtrain.data.row import Origin
from fluxtrain.errors import BadInput
from fluxtrain.units import bytes_text

LINE_LIMIT_BYTES = 64 << 20
BLANK_BYTES = 256 << 10  # of lines without a word in a row: what follows of them teaches nothing


@dataclass(frozen=True, slots=True)
class TextLine:
    """A decoded line with its end."""

    number: int  # from 1, or the bytes before it
    text: str


def lines(source: Source) -> Iterator[TextLine | Problem]:
    """Yield every line; one that is no UTF-8, holds a NUL or is too long is a `Problem`. Of blank
    lines in a row those beyond `BLANK_BYTES` are left out."""
    number, offset = (source.at if source.jumped else 1), source.at
    unit: Literal["line", "byte"] = "byte" if source.jumped else "line"
    blank_bytes = 0
    while raw := source.readline(LINE_LIMIT_BYTES + 1):
        origin = Origin(source.name, number, unit)
        too_long = len(raw) > LINE_LIMIT_BYTES
        if (nul := raw.find(b"\0")) >= 0:
            yield Problem(
                origin,
                f" is binary: a NUL byte at offset {offset + nul} of the file; data is UTF-8 text",
            )
        elif too_long:
            yield Problem(origin, _too_long())
        while too_long and raw and not raw.endswith(b"\n"):
            raw = source.readline(1 << 20)
        if nul < 0 and not too_long:
            yield _decoded(raw, origin, offset)
        blank_bytes = 0 if raw.strip() else blank_bytes + len(raw)
        skipped = source.skip_blank_lines() if blank_bytes > BLANK_BYTES else 0
        offset = source.at
        number = offset if source.jumped else number + 1 + skipped


def text_lines(source: Source) -> Iterator[TextLine]:
    """Yield every line. Raises BadInput at the first that cannot be read."""
    for line in lines(source):
        if isinstance(line, Problem):
            raise BadInput(str(line))
        yield line


def _too_long() -> str:
    return (
        f" is longer than {bytes_text(LINE_LIMIT_BYTES)}: break it into lines (.txt) or one "
        "document a line (.jsonl)"
    )


def _decoded(raw: bytes, origin: Origin, offset: int) -> TextLine | Problem:
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        return Problem(
            origin,
            f" is not UTF-8: byte 0x{raw[error.start]:02x} at offset {offset + error.start} of "
            "the file; convert it, for example with `iconv -f LATIN1 -t UTF-8`",
        )
    return TextLine(
        origin.number,
        text.removeprefix("\ufeff") if (origin.number, origin.unit) == (1, "line") else text,
    )
