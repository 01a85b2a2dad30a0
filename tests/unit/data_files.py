"""Writes data files in every container, for tests of reading."""

from __future__ import annotations

import csv
import gzip
import io
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow
import zstandard
from pyarrow import ipc, parquet

from fluxtrain.data.reading.corpus import Corpus, Reading
from fluxtrain.data.reading.report import Report
from fluxtrain.data.reading.request import read_request
from fluxtrain.data.row import Row

CHAT = [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}]
CONTAINERS = ("jsonl", "ndjson", "json", "csv", "tsv", "parquet", "arrow", "stream.arrow")
PACKED = ("", ".gz", ".zst")

Records = list[dict[str, Any]]


def contents(kind: str, records: Records) -> bytes:
    """The bytes of a file with these rows."""
    if kind in ("jsonl", "ndjson"):
        return "".join(json.dumps(record) + "\n" for record in records).encode()
    if kind == "json":
        return json.dumps(records, ensure_ascii=False, indent=1).encode()
    if kind in ("csv", "tsv"):
        out = io.StringIO(newline="")
        names = list(records[0])
        writer = csv.DictWriter(out, names, delimiter="," if kind == "csv" else "\t")
        writer.writeheader()
        writer.writerows(records)
        return out.getvalue().encode()
    table, sink = pyarrow.Table.from_pylist(records), io.BytesIO()
    if kind == "parquet":
        parquet.write_table(table, sink, row_group_size=7)
    else:
        made = ipc.new_stream if kind == "stream.arrow" else ipc.new_file
        with made(sink, table.schema) as writer:
            writer.write_table(table, max_chunksize=5)
    return sink.getvalue()


def packed(data: bytes, suffix: str) -> bytes:
    """The bytes as a .gz or .zst file, or as they are."""
    if suffix == ".gz":
        return gzip.compress(data, mtime=0)
    return zstandard.ZstdCompressor().compress(data) if suffix == ".zst" else data


def write(folder: Path, name: str, data: bytes | str) -> Path:
    path = folder / name
    path.write_bytes(data if isinstance(data, bytes) else data.encode())
    return path


def lines(folder: Path, *records: Any, name: str = "data.jsonl") -> Path:
    return write(folder, name, "".join(json.dumps(record) + "\n" for record in records))


def corpus(path: Any, **settings: Any) -> Corpus:
    return read_request(
        {"path": path if isinstance(path, list) else str(path), **settings}
    ).corpus()


def rows(path: Any, **settings: Any) -> list[Row]:
    return list(Reading(corpus(path, **settings)))


def reported(path: Any, **settings: Any) -> tuple[list[Row], Report]:
    reading = Reading(corpus(path, **settings))
    return list(reading), reading.report


CAPPED = """
import resource, sys
limit = int(sys.argv[2])
from fluxtrain.data.reading.corpus import Reading
from fluxtrain.data.reading.request import read_request
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
rows = characters = 0
for row in Reading(read_request({"path": sys.argv[1]}).corpus()):
    rows += row.ends
    characters += row.characters
status = open("/proc/self/status").read()  # ru_maxrss would count the parent before the exec
peak = int(status.split("VmHWM:")[1].split()[0]) << 10
print(rows, characters, peak)
"""


def read_capped(path: Path, limit_bytes: int) -> tuple[int, int, int]:
    """Read in a process that may map so many bytes: its rows, characters and peak memory."""
    done = subprocess.run(
        [sys.executable, "-c", CAPPED, str(path), str(limit_bytes)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    count, characters, peak = map(int, done.stdout.split())
    return count, characters, peak
