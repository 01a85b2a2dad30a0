"""Cuts long texts into pieces of bounded size, at blank lines or before white space."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from fluxtrain.data.containers.lines import TextLine, text_lines
from fluxtrain.data.containers.streams import Source
from fluxtrain.data.row import Origin, Row

SECTION_CHARACTERS = 64 << 10  # a long text is cut at the first blank line after this many
SEPARATOR = "<|endoftext|>"  # alone on a line of a text file it ends a document


def texts(source: Source) -> Iterator[Row]:
    """Yield the documents of a plain text file, the long ones in pieces."""
    # the ends of lines are the file's, as everywhere where files are opened as text
    ended = (replace(line, text=_with_newline(line.text)) for line in text_lines(source))
    for section in _sections(ended, SEPARATOR):
        yield Row(
            origin=Origin(source.name, section.line),
            text=section.text,
            begins=section.begins,
            ends=section.ends,
        )


def _with_newline(line: str) -> str:
    return line[:-2] + "\n" if line.endswith("\r\n") else line


def pieces_of(row: Row) -> Iterator[Row]:
    """Yield a row of text; several if it is long, each with the origin of the whole."""
    if len(row.text) <= 2 * SECTION_CHARACTERS:
        yield row
        return
    numbered = (TextLine(0, line) for line in row.text.splitlines(keepends=True))
    for section in _sections(numbered, separator=None):
        yield replace(row, text=section.text, begins=section.begins, ends=section.ends)


@dataclass(frozen=True, slots=True)
class _Section:
    line: int
    text: str
    begins: bool
    ends: bool


def _sections(lines: Iterable[TextLine], separator: str | None) -> Iterator[_Section]:
    section: list[str] = []
    characters = first_line = 0
    begins = True

    def finished(ends: bool) -> Iterator[_Section]:
        nonlocal begins
        text = "".join(section)
        section.clear()
        if text.strip():
            yield _Section(first_line, text, begins, ends)
            begins = ends
        elif ends:
            begins = True

    for line in lines:
        if separator is not None and line.text.strip() == separator:
            yield from finished(ends=True)
            characters = 0
            continue
        if not line.text.strip() and characters >= 2 * SECTION_CHARACTERS:
            continue  # blank lines alone would grow without bound and teach nothing
        for at, piece in enumerate(_pieces(line.text)):
            full = characters >= SECTION_CHARACTERS
            if at or (full and _may_cut_before(piece, section, characters)):
                yield from finished(ends=False)
                characters = 0
            if not section:
                first_line = line.number
            section.append(piece)
            characters += len(piece)
    yield from finished(ends=True)


def _pieces(line: str) -> Iterator[str]:
    """Yield a line, or parts of one to two sections: cut before white space, as tokenizers cut.

    A tokenizer encodes one text on one core and needs some 250 bytes a character meanwhile.
    """
    start, stop = 0, len(line.rstrip())
    while stop - start > 2 * SECTION_CHARACTERS:
        most = start + 2 * SECTION_CHARACTERS
        end = max(line.rfind(blank, start + SECTION_CHARACTERS, most) for blank in " \t\u3000")
        end = end if end >= 0 else most
        yield line[start:end]
        start = end
    yield line[start:]


def _may_cut_before(line: str, section: list[str], characters: int) -> bool:
    if not line.strip():
        return False
    return not section[-1].strip() or characters >= 2 * SECTION_CHARACTERS
