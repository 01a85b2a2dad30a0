"""Tells what container a file is, by its name and its first bytes, and reads its rows."""

from __future__ import annotations

import codecs
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from fluxtrain.data.containers.columnar import ARROW_FILE, columnar_rows
from fluxtrain.data.containers.json_rows import json_lines, json_values
from fluxtrain.data.containers.record import Problem, Record
from fluxtrain.data.containers.streams import SUFFIXES as PACKED
from fluxtrain.data.containers.streams import Source
from fluxtrain.data.containers.tables import table_rows
from fluxtrain.errors import BadInput

Container = Literal["text", "json lines", "json array", "csv", "tsv", "parquet", "arrow"]

SUFFIXES: dict[str, Container] = {
    ".txt": "text",
    ".text": "text",
    ".md": "text",
    ".rst": "text",
    ".jsonl": "json lines",
    ".ndjson": "json lines",
    ".json": "json lines",
    ".csv": "csv",
    ".tsv": "tsv",
    ".parquet": "parquet",
    ".pq": "parquet",
    ".arrow": "arrow",
    ".feather": "arrow",
}
READABLE = ", ".join(suffix for suffix in SUFFIXES if suffix not in {".text", ".pq", ".feather"})

_ABOUT_NAMES = ("readme", "license", "licence", "notice", "changelog", "citation", "contributing")
_ABOUT_FILES = frozenset(
    {"dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json"}
)
_HEAD_BYTES = 64 << 10
_PARQUET = b"PAR1"
_ARROW_STREAM = b"\xff\xff\xff\xff"
_BINARY = (_PARQUET, ARROW_FILE, _ARROW_STREAM)
_UTF16_MARKS = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
_TO_UTF8 = "convert it with `iconv -f {} -t UTF-8`"
_PICKLE = "a pickle, which may hold any program: write its rows as .jsonl or .parquet"
_UNREADABLE = {
    b"PK\x03\x04": "a zip file (or a spreadsheet): unpack it, or export it as .csv",
    b"%PDF": "a PDF: export its text as .txt",
    b"BZh": "a bzip2 file: unpack it, or pack it with gzip",
    b"\xfd7zXZ": "an xz file: unpack it, or pack it with gzip",
    b"7z\xbc\xaf": "a 7z file: unpack it first",
    b"SQLite format 3": "a database: export its rows as .jsonl or .csv",
    b"version https://git-lfs": "a pointer of Git LFS, not the data: run `git lfs pull`",
    b"/annex/objects/": "a pointer of git-annex, not the data: run `git annex get`",
    b"\x89PNG": "a picture: data is text",
    b"\xff\xd8\xff": "a picture: data is text",
    b"\x93NUMPY": "an array of NumPy: write its texts as .jsonl or .parquet",
    b"\x80\x02": _PICKLE,
    b"\x80\x03": _PICKLE,
    b"\x80\x04": _PICKLE,
    b"\x80\x05": _PICKLE,
    b"\x1f\x8b": "packed twice: unpack it once",
    b"(\xb5/\xfd": "packed twice: unpack it once",
}


@dataclass(frozen=True, slots=True)
class Opened:
    """The kind of a file, and the reason for it."""

    container: Container
    because: str  # "its name ends in .csv"


def suffix_of(path: Path) -> str:
    """Return the suffix that names the container: `.jsonl` of `a.jsonl.gz`; lower case."""
    suffixes = [suffix.lower() for suffix in path.suffixes[-2:]]
    if suffixes and suffixes[-1] in PACKED:
        suffixes.pop()
    return suffixes[-1] if suffixes else ""


def is_about_data(path: Path) -> bool:
    """Return whether a file is about the data (a README, a license, a description) instead of
    data."""
    name = path.name.lower()
    return name in _ABOUT_FILES or name.partition(".")[0].startswith(_ABOUT_NAMES)


def container_of(path: Path) -> Opened:
    """Tell what container a file is; JSON by its content, everything else by its name first.

    Raises BadInput if the file is missing, a directory, empty, or of a kind that is not read.
    """
    head = _checked_head(path)
    suffix = suffix_of(path)
    named = SUFFIXES.get(suffix)
    if named == "parquet" and not head.startswith(_PARQUET):
        raise BadInput(f"{path} is named {suffix} and is no Parquet file: it was cut or renamed")
    if named == "json lines":
        return _json(path, head)
    if named is not None:
        return Opened(named, f"its name ends in {suffix}")
    if head.startswith(_PARQUET):
        return Opened("parquet", "its first bytes are those of Parquet")
    if head.startswith((ARROW_FILE, _ARROW_STREAM)):
        return Opened("arrow", "its first bytes are those of Arrow")
    start = head.lstrip()
    if start.startswith(b"{"):
        return _json(path, head)
    if start.startswith(b"[") and start[1:].lstrip().startswith(b"{"):
        return Opened("json array", "it begins with [ and {")
    return Opened("text", "its first line is not a JSON object")


def records(source: Source, container: Container) -> Iterator[Record | Problem]:
    """Yield the records of a file that is no plain text, in file order."""
    if container == "json lines":
        return json_lines(source)
    if container == "json array":
        return json_values(source)
    if container in ("csv", "tsv"):
        return table_rows(source, container)
    return columnar_rows(source, container)


def _checked_head(path: Path) -> bytes:
    """Return the first bytes, unpacked; refuse a file that cannot be data."""
    if path.is_dir():
        raise BadInput(f"{path} is a directory: name a file in it")
    with Source(path) as source:
        head = source.read(_HEAD_BYTES)
    if not head.strip():
        with Source(path) as source:
            while not head.strip() and head:
                head = source.read(1 << 20)
        if not head:
            raise BadInput(f"{path} is empty: there is nothing to train on")
    _refuse_other_kinds(path, head)
    head = head.removeprefix(codecs.BOM_UTF8)
    if b"\n" not in head and head.count(b"\r") > 1 and not head.startswith(_BINARY):
        raise BadInput(
            f"{path} ends its lines with a carriage return alone, as old Mac files do: convert it "
            r"with `tr '\r' '\n'`"
        )
    return head


def _refuse_other_kinds(path: Path, head: bytes) -> None:
    """Raise BadInput with the cure for a file that is neither UTF-8 text nor a readable table."""
    for mark, advice in _UNREADABLE.items():
        if head.startswith(mark):
            raise BadInput(f"{path} is {advice}")
    if head[257:262] == b"ustar":
        raise BadInput(f"{path} is a tar archive: unpack it, and name the folder")
    if head.startswith((codecs.BOM_UTF32_LE, codecs.BOM_UTF32_BE)):
        raise BadInput(f"{path} is UTF-32: {_TO_UTF8.format('UTF-32')}")
    if head.startswith(_UTF16_MARKS):
        raise BadInput(f"{path} is UTF-16: {_TO_UTF8.format('UTF-16')}")


def _json(path: Path, head: bytes) -> Opened:
    """Tell lines from an array and from objects over several lines."""
    start = head.lstrip()
    named = f"its name ends in {suffix_of(path)}" if suffix_of(path) in SUFFIXES else ""
    if start.startswith(b"["):
        return Opened("json array", f"{named} and it begins with [".removeprefix(" and "))
    first_line = start.partition(b"\n")[0].rstrip()
    if first_line == b"{" or (suffix_of(path) == ".json" and not first_line.endswith(b"}")):
        return Opened("json array", "it holds objects over several lines")
    return Opened("json lines", named or "its first line is a JSON object")
