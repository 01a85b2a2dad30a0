"""Detects the format of a data file and reads its documents one by one in bounded memory.

Standard library only, so that the app can look at a file without loading torch.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from fluxtrain.data.row import ROLES, Message, Origin, Row, weights_of
from fluxtrain.errors import BadInput
from fluxtrain.units import bytes_text

Format = Literal["text", "jsonl-text", "jsonl-messages"]
FORMATS: tuple[Format, ...] = get_args(Format)

LINE_LIMIT_BYTES = 64 << 20
SECTION_CHARACTERS = 64 << 10  # a long text is cut at the first blank line after this many
SEPARATOR = "<|endoftext|>"  # alone on a line of a text file it ends a document

_TEXT_SUFFIXES = frozenset({".txt", ".text", ".md", ".rst"})
_UTF16_MARKS = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
_CONTAINERS = {
    b"\x1f\x8b": "a gzip file: decompress it first",
    b"PK\x03\x04": "a zip file: unpack it first",
    b"(\xb5/\xfd": "a zstandard file: decompress it first",
    b"PAR1": "a Parquet file: export its text column as .jsonl",
    b"%PDF": "a PDF: export its text as .txt",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Detected:
    """A file's format and the reason in words."""

    format: Format
    because: str


@dataclass(frozen=True, slots=True)
class _Line:
    number: int
    text: str


def detected(path: Path, wished: str = "auto") -> Detected:
    """Return the requested format; for `auto` detect it from the file.

    Raises BadInput for an unknown format, and as `detect` does.
    """
    if wished == "auto":
        return detect(path)
    named = next((format for format in FORMATS if format == wished), None)
    if named is None:
        raise BadInput(f"data.format {wished!r} is not one of auto, {', '.join(FORMATS)}")
    return Detected(format=named, because="data.format says so")


def detect(path: Path) -> Detected:
    """Detect the format of `path` by its name and its first line that is not blank.

    Raises BadInput if the file is missing, a directory, empty, binary or not UTF-8, or if it is
    JSON of a shape that cannot be trained on.
    """
    _check_is_readable_file(path)
    first = next((line for line in _lines(path) if line.text.strip()), None)
    if first is None:
        raise BadInput(f"{path} is empty: there is no text to train on")
    if path.suffix.lower() in _TEXT_SUFFIXES:
        return Detected(format="text", because=f"the name ends in {path.suffix}")
    if path.suffix.lower() == ".json" and not first.text.rstrip().endswith("}"):
        raise BadInput(
            f"{path} is one JSON value, not one object a line: write it as such (.jsonl), "
            "for example with `jq -c '.[]'`"
        )
    named_as_lines = path.suffix.lower() in {".jsonl", ".json", ".ndjson"}
    if not named_as_lines and not first.text.lstrip().startswith("{"):
        return Detected(format="text", because="its first line is not a JSON object")
    record = _record(path, first)
    if "messages" in record:
        return Detected(format="jsonl-messages", because="its first object has `messages`")
    if "text" in record:
        return Detected(format="jsonl-text", because="its first object has `text`")
    raise BadInput(_missing_key(path, first.number, "text` or `messages", record))


def documents(path: Path, format: Format) -> Iterator[Row]:
    """Yield the documents of `path` in file order; memory is bounded by the longest line.

    Raises BadInput with the line and the cure at the first unusable document, and at the end if
    there was none at all.
    """
    _check_is_readable_file(path)
    readers = {
        "text": _texts,
        "jsonl-text": _json_texts,
        "jsonl-messages": _conversations,
    }
    found = False
    for document in readers[format](path):
        found = True
        yield document
    if not found:
        raise BadInput(f"{path} is empty: there is no text to train on")


def _check_is_readable_file(path: Path) -> None:
    if path.is_dir():
        raise BadInput(f"{path} is a directory: name one .txt or .jsonl file in it")
    if not path.exists():
        raise BadInput(f"{path} does not exist: check data.path")
    if not path.is_file():
        raise BadInput(f"{path} is not a regular file: data is read more than once")
    try:
        with path.open("rb") as file:
            head = file.read(8)
    except OSError as error:
        raise BadInput(f"{path} cannot be read: {error.strerror}") from error
    if not head:
        raise BadInput(f"{path} is empty: there is no text to train on")
    if head.startswith(_UTF16_MARKS):
        raise BadInput(f"{path} is UTF-16: convert it with `iconv -f UTF-16 -t UTF-8`")
    for mark, advice in _CONTAINERS.items():
        if head.startswith(mark):
            raise BadInput(f"{path} is {advice}")


def _lines(path: Path) -> Iterator[_Line]:
    """Yield decoded lines with their ends; never hold more than LINE_LIMIT_BYTES of the file."""
    offset = 0
    with path.open("rb") as file:
        number = 1
        while raw := file.readline(LINE_LIMIT_BYTES + 1):
            if (nul := raw.find(b"\0")) >= 0:
                raise BadInput(
                    f"{path} is binary: a NUL byte at offset {offset + nul} (line {number}); "
                    "data is .txt or .jsonl in UTF-8"
                )
            if len(raw) > LINE_LIMIT_BYTES:
                raise BadInput(
                    f"{path} line {number} is longer than {bytes_text(LINE_LIMIT_BYTES)}: "
                    "break it into lines (.txt) or one document a line (.jsonl)"
                )
            yield _Line(number, _decoded(path, raw, number, offset))
            offset += len(raw)
            number += 1


def _decoded(path: Path, raw: bytes, number: int, offset: int) -> str:
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise BadInput(
            f"{path} is not UTF-8: byte 0x{raw[error.start]:02x} at offset "
            f"{offset + error.start} (line {number}); "
            "convert it, for example with `iconv -f LATIN1 -t UTF-8`"
        ) from error
    return text.removeprefix("\ufeff") if number == 1 else text


def _texts(path: Path) -> Iterator[Row]:
    """Yield texts between separator lines; cut long ones at a blank line or in a long line."""
    section: list[str] = []
    characters = first_line = 0
    begins = True

    def finished(ends: bool) -> Iterator[Row]:
        nonlocal begins
        text = "".join(section)
        section.clear()
        if text.strip():
            origin = Origin(str(path), first_line)
            yield Row(origin=origin, text=text, begins=begins, ends=ends)
            begins = ends
        elif ends:
            begins = True

    for line in _lines(path):
        if line.text.strip() == SEPARATOR:
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


def _json_texts(path: Path) -> Iterator[Row]:
    for line in _lines(path):
        if not line.text.strip():
            continue
        record = _record(path, line)
        if "text" not in record:
            raise BadInput(_missing_key(path, line.number, "text", record))
        text = record["text"]
        if not isinstance(text, str):
            raise BadInput(
                f"{path} line {line.number}: `text` is {_kind(text)}, and it must be a string"
            )
        if text.strip():
            yield Row(origin=Origin(str(path), line.number), text=text)


def _conversations(path: Path) -> Iterator[Row]:
    for line in _lines(path):
        if not line.text.strip():
            continue
        record = _record(path, line)
        if "messages" not in record:
            raise BadInput(_missing_key(path, line.number, "messages", record))
        messages = _checked_messages(f"{path} line {line.number}", record["messages"])
        origin = Origin(str(path), line.number)
        yield Row(origin=origin, messages=messages, weights=weights_of(messages))


def _checked_messages(where: str, messages: Any) -> tuple[Message, ...]:
    if not isinstance(messages, list):
        raise BadInput(f"{where}: `messages` is {_kind(messages)}, and it must be a list")
    if not messages:
        raise BadInput(f"{where}: `messages` is empty: remove the line or fill it")
    for index, message in enumerate(messages, start=1):
        _check_message(f"{where}, message {index}", message)
    if all(message["role"] != "assistant" for message in messages):
        roles = ", ".join(message["role"] for message in messages[:8])
        raise BadInput(
            f"{where}: no message has the role assistant (roles: {roles}), "
            "so there is nothing to learn: the loss is on the assistant's words"
        )
    return tuple(messages)


def _check_message(where: str, message: Any) -> None:
    if not isinstance(message, dict):
        raise BadInput(f'{where} is {_kind(message)}: write {{"role": ..., "content": ...}}')
    if "role" not in message:
        cure = "rename `from` to `role` and `value` to `content`" if "from" in message else ""
        cure = cure or f"add one of {', '.join(ROLES)}"
        raise BadInput(f"{where} has no `role` (its keys: {_keys(message)}): {cure}")
    if message["role"] not in ROLES:
        raise BadInput(f"{where}: role {message['role']!r} is not one of {', '.join(ROLES)}")
    content = message.get("content")
    calls_a_tool = content is None and bool(message.get("tool_calls"))
    if not isinstance(content, str) and not calls_a_tool:
        raise BadInput(
            f"{where}: `content` is {_kind(content)}, and it must be a string "
            f"(its keys: {_keys(message)})"
        )


def _record(path: Path, line: _Line) -> dict[str, Any]:
    try:
        record = json.loads(line.text)
    except json.JSONDecodeError as error:
        raise BadInput(
            f"{path} line {line.number} is not JSON: {error.msg} at column {error.colno}; "
            "each line must be one whole JSON object"
        ) from error
    except ValueError as error:
        raise BadInput(
            f"{path} line {line.number} has a number of thousands of digits in it: take it out, or "
            "write it as a string"
        ) from error
    except RecursionError as error:
        raise BadInput(f"{path} line {line.number}: its JSON is nested too deeply") from error
    if not isinstance(record, dict):
        raise BadInput(
            f"{path} line {line.number} is {_kind(record)}, and each line must be a JSON object"
        )
    if "\\ud" in line.text.lower():
        _refuse_half_pairs(path, line.number, record)
    return record


def _refuse_half_pairs(path: Path, number: int, record: dict[str, Any]) -> None:
    try:
        json.dumps(record, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        half = ascii(error.object[error.start])[1:-1]
        raise BadInput(
            f"{path} line {number} holds {half}, half of a pair that makes one character: "
            "a tool cut the text between the two; remove it"
        ) from error


def _missing_key(path: Path, number: int, key: str, record: dict[str, Any]) -> str:
    return (
        f"{path} line {number} has no `{key}`: its keys are {_keys(record)}; "
        "rename the key that holds the text"
    )


def _keys(record: dict[str, Any]) -> str:
    shown = ", ".join(list(record)[:12]) or "none"
    return shown + (", ..." if len(record) > 12 else "")


def _kind(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "a string", bool: "a boolean"}
    if value is None:
        return "null or missing"
    return names.get(type(value), "a number")
