"""Files as people really have them, and files that mean harm."""

from __future__ import annotations

import io
import json
import os
import socket
import struct
from pathlib import Path
from typing import Any

import pyarrow
import pytest
import zstandard
from pyarrow import parquet

from fluxtrain.errors import BadInput
from tests.unit.data_files import CHAT, corpus, packed, reported, rows, write

LINE = b'{"text": "a"}\n'


def refusal(path: Path, **settings: Any) -> str:
    with pytest.raises(BadInput) as refused:
        rows(path, **settings)
    return str(refused.value)


def test_a_folder_follows_links_inside_and_counts_what_it_leaves_out(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    (folder / "inner").mkdir(parents=True)
    (beside := folder / ".beside").mkdir()
    write(folder, "a.jsonl", LINE)
    write(beside, "b.jsonl", LINE.replace(b"a", b"b"))
    write(folder, "_c.jsonl", LINE)
    write(folder, ".d.jsonl", LINE)
    (folder / "linked").symlink_to(beside)
    (folder / "again.jsonl").symlink_to(folder / "a.jsonl")
    (folder / "nowhere.jsonl").symlink_to("/nonexistent/annex")
    (folder / "inner" / "loop").symlink_to(folder)
    os.mkfifo(folder / "pipe.jsonl")
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(str(folder / "socket.jsonl"))
        found, report = reported(folder)
    assert sorted(row.text for row in found) == ["a", "b"]
    left = {Path(name).name for name in report.left_out_files}
    assert left == {"_c.jsonl", "again.jsonl", "nowhere.jsonl", "pipe.jsonl", "socket.jsonl"}
    found, report = reported(str(folder / "**" / "*.jsonl"))
    assert len(found) == 3
    left = {Path(name).name for name in report.left_out_files}
    assert left == {"nowhere.jsonl", "pipe.jsonl", "socket.jsonl"}


def hub_snapshot(root: Path) -> Path:
    """A data set as the hub's client keeps it: links into a folder of blobs."""
    snapshot = root / "datasets--a--b" / "snapshots" / "1f0c" / "data"
    snapshot.mkdir(parents=True)
    (root / "datasets--a--b" / "blobs").mkdir()
    (root / "datasets--a--b" / "blobs" / "77aa").write_bytes(LINE)
    (snapshot / "train.jsonl").symlink_to("../../../blobs/77aa")
    return snapshot.parent


@pytest.mark.parametrize("named", ["link.jsonl", "data", "data/a*", "hub", "hub/**/*.jsonl"])
def test_links_that_are_named_or_lead_to_the_hubs_blobs_are_followed(
    tmp_path: Path, named: str
) -> None:
    write(tmp_path, "a.jsonl", LINE)
    (tmp_path / "link.jsonl").symlink_to(tmp_path / "a.jsonl")
    (tmp_path / "real").mkdir()
    write(tmp_path / "real", "a.jsonl", LINE)
    (tmp_path / "data").symlink_to(tmp_path / "real")
    (tmp_path / "hub").symlink_to(hub_snapshot(tmp_path / "cache"))
    assert [row.text for row in rows(str(tmp_path / named))] == ["a"]


@pytest.mark.parametrize("named", ["data", "data/*.jsonl", "data/**/*.jsonl", "hub"])
@pytest.mark.parametrize("linked", ["file", "folder"])
def test_links_that_lead_out_of_a_folder_are_refused_with_the_cure(
    tmp_path: Path, named: str, linked: str
) -> None:
    folder = hub_snapshot(tmp_path) if named == "hub" else tmp_path / "data"
    folder.mkdir(exist_ok=True)
    (secret := tmp_path / "secret").mkdir()
    write(folder, "a.jsonl", LINE)
    write(secret, "key.jsonl", LINE)
    if linked == "file":
        (folder / "b.jsonl").symlink_to(secret / "key.jsonl")
    else:
        (folder / "b").symlink_to(secret)
    path = str(folder) if named == "hub" else str(tmp_path / named)
    if (named, linked) == ("data/*.jsonl", "folder"):
        assert [row.text for row in rows(path)] == ["a"], "the pattern reaches no linked folder"
        return
    said = refusal(Path(path))
    assert str(secret) in said and "name that itself in data.path" in said


@pytest.mark.parametrize(
    ("path", "complaint"),
    [
        ("x" * 5000, "cannot be read: File name too long"),
        ("/proc/self/mem", "cannot be read"),
        ("/dev/null", "is not a regular file"),
        ("a\0b", "does not exist"),
    ],
)
def test_a_path_that_cannot_be_opened_is_refused(path: str, complaint: str) -> None:
    with pytest.raises(BadInput, match=complaint):
        corpus(path)


@pytest.mark.parametrize(
    ("head", "complaint"),
    [
        (b"\x89PNG\r\n\x1a\n", "a picture"),
        (b"\x80\x04\x95abc", "a pickle"),
        (b"a.txt" + bytes(252) + b"ustar", "a tar archive"),
        (b"PK\x03\x04", "unpack"),
        (b"BZh9", "gzip"),
        (b"\x1f\x8b\x08rest", "is damaged"),
        ("Hi\n".encode("utf-16"), "iconv -f UTF-16 "),
        ("Hi\n".encode("utf-32"), "iconv -f UTF-32"),
        (b"version https://git-lfs.github.com/spec/v1", "git lfs pull"),
        (b"/annex/objects/SHA256E-s1", "git annex get"),
        (b'{"text": "a"}\r{"text": "b"}\r', "carriage return alone"),
        (packed(packed(LINE, ".gz"), ".gz"), "packed twice"),
    ],
)
def test_a_file_of_another_kind_is_refused_with_the_cure(
    tmp_path: Path, head: bytes, complaint: str
) -> None:
    assert complaint in refusal(write(tmp_path, "a.jsonl", head))


def test_zstandard_files_of_other_tools_are_read(tmp_path: Path) -> None:
    skipped = b"\x50*M\x18" + struct.pack("<I", 4) + b"abcd"  # as pzstd writes
    assert len(rows(write(tmp_path, "a.jsonl.zst", skipped + packed(LINE, ".zst")))) == 1
    options = zstandard.ZstdCompressionParameters.from_level(3, window_log=31, enable_ldm=True)
    made = zstandard.ZstdCompressor(compression_params=options).compressobj()
    long = made.compress(LINE * 9) + made.flush()  # `zstd --long=31`
    assert len(rows(write(tmp_path, "b.jsonl.zst", long))) == 9


@pytest.mark.parametrize(
    ("table", "ignored"),
    [
        (",prompt,completion\n0,how,so\n", {"column 1"}),
        ("prompt,completion,\nhow,so,\n", set()),
        ("sep=;\nprompt;completion\nhow;so\n", set()),
        ('\ufeff"prompt";"completion"\r\n"how";"so"\r\n', set()),
    ],
)
def test_tables_of_pandas_and_spreadsheets_are_read(
    tmp_path: Path, table: str, ignored: set[str]
) -> None:
    [row], report = reported(write(tmp_path, "a.csv", table))
    assert [message["content"] for message in row.messages] == ["how", "so"]
    assert set(report.ignored) == ignored


def test_a_list_that_was_written_into_a_cell_by_python_is_refused(tmp_path: Path) -> None:
    cell = str(CHAT).replace('"', '""')
    told = refusal(write(tmp_path, "a.csv", f'messages\n"{cell}"\n'))
    assert "`messages` is a string that is no JSON" in told and ".parquet" in told
    told = refusal(write(tmp_path, "b.csv", "prompt,completion\nhow\rso,so\nhow,so\n"))
    assert "carriage return alone" in told and r"tr '\r' '\n'" in told


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        ({"version": 1, "data": [{"prompt": "how", "completion": "so"}]}, "jq -c '.data[]'"),
        ({"prompt": {"0": "how"}, "completion": {"0": "so"}}, 'orient="records", lines=True'),
        ([["how", "so"]], 'such as {"messages": [...]}'),
        (["how"], 'such as {"text": ...}'),
        ([{"text": ["how"]}], "`text` is a list, and it must be a string"),
    ],
)
def test_json_of_another_build_is_refused_with_the_cure(
    tmp_path: Path, content: Any, complaint: str
) -> None:
    assert complaint in refusal(write(tmp_path, "a.json", json.dumps(content)))


def test_a_map_with_a_key_twice_is_refused(tmp_path: Path) -> None:
    kind = pyarrow.map_(pyarrow.string(), pyarrow.string())
    schema = pyarrow.schema([("text", pyarrow.string()), ("more", kind)])
    table = pyarrow.Table.from_pylist([{"text": "a", "more": [("b", "1"), ("b", "2")]}], schema)
    made = io.BytesIO()
    parquet.write_table(table, made)
    assert "a map with the same key twice" in refusal(write(tmp_path, "a.parquet", made.getvalue()))


def test_line_ends_of_windows_are_not_trained_on(tmp_path: Path) -> None:
    path = write(tmp_path, "a.txt", b"one\r\ntwo\r\n<|endoftext|>\r\nthree\r\n")
    assert [row.text for row in rows(path)] == ["one\ntwo\n", "three\n"]
