"""Containers: the same rows come out of each, packed or not, and what is damaged is told."""

from __future__ import annotations

import sys
import zlib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fluxtrain.data.containers import lines as line_module
from fluxtrain.errors import BadInput
from tests.unit.data_files import CONTAINERS, PACKED, contents, corpus, packed, rows, write

words = st.text(st.characters(codec="utf-8", exclude_categories=("Cs", "Cc")), min_size=1)
filled = words.filter(str.strip)
texts = st.lists(st.fixed_dictionaries({"text": filled, "id": words}), min_size=1, max_size=20)


@given(records=texts)
@settings(max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture])
@pytest.mark.parametrize("kind", CONTAINERS)
def test_every_container_gives_the_rows_that_were_written(
    tmp_path: Path, kind: str, records: list[dict[str, Any]]
) -> None:
    path = write(tmp_path, f"data.{kind}", contents(kind, records))
    assert [row.text for row in rows(path)] == [record["text"] for record in records]


@pytest.mark.parametrize("suffix", PACKED)
@pytest.mark.parametrize("kind", CONTAINERS)
def test_every_container_may_be_packed(tmp_path: Path, kind: str, suffix: str) -> None:
    records = [{"prompt": f"how many {i}?", "completion": f'"{i}", or\nso'} for i in range(30)]
    path = write(tmp_path, f"data.{kind}{suffix}", packed(contents(kind, records), suffix))
    found = rows(path)
    assert [row.messages[1]["content"] for row in found] == [r["completion"] for r in records]
    assert found[-1].origin.number in (30, 62, 61, 60), "the number of a line, or of a row"


@pytest.mark.parametrize("suffix", PACKED)
@pytest.mark.parametrize("name", ["a.txt", "a.md", "a.rst"])
def test_plain_text_may_be_packed(tmp_path: Path, name: str, suffix: str) -> None:
    path = write(tmp_path, name + suffix, packed("one\n<|endoftext|>\nzwölf\n".encode(), suffix))
    assert [row.text for row in rows(path)] == ["one\n", "zwölf\n"]


def test_a_packed_file_is_known_by_its_bytes_and_not_by_its_name(tmp_path: Path) -> None:
    data = b'{"text": "x"}\n'
    assert len(rows(write(tmp_path, "a.jsonl.gz", data))) == 1, "a browser unpacked it"
    assert len(rows(write(tmp_path, "b.jsonl", packed(data, ".gz")))) == 1


def test_packed_files_one_behind_the_other_are_one_file(tmp_path: Path) -> None:
    for suffix in (".gz", ".zst"):
        parts = [packed(b'{"text": "%d"}\n' % i, suffix) for i in range(3)]
        padding = b"\0" * 700 if suffix == ".gz" else b""
        path = write(tmp_path, f"a.jsonl{suffix}", b"".join(parts) + padding)
        assert [row.text for row in rows(path)] == ["0", "1", "2"]


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
@pytest.mark.parametrize("kind", ["jsonl", "json", "csv", "parquet"])
@given(cut=st.floats(0.05, 0.99))
@settings(max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_packed_file_that_is_cut_anywhere_is_refused(
    tmp_path: Path, kind: str, suffix: str, cut: float
) -> None:
    records = [{"text": f"the {i}th of many texts"} for i in range(200)]
    data = packed(contents(kind, records), suffix)
    path = write(tmp_path, f"a.{kind}{suffix}", data[: int(cut * len(data))])
    with pytest.raises(BadInput, match="is cut off in the middle|is named .parquet and"):
        rows(path)


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
def test_a_damaged_packed_file_is_refused_with_its_place(tmp_path: Path, suffix: str) -> None:
    noise = bytes(zlib.crc32(bytes([i % 256, i // 256])) % 256 for i in range(20_000))
    data = bytearray(packed(b'{"text": "' + noise.hex().encode() + b'"}\n', suffix))
    data[len(data) // 2] ^= 0xFF
    path = write(tmp_path, f"a.jsonl{suffix}", bytes(data))
    with pytest.raises(BadInput, match="is damaged"):
        rows(path)


@pytest.mark.parametrize("kind", ["parquet", "arrow", "stream.arrow"])
@pytest.mark.parametrize("keep", [0.3, 0.7, 0.95])
def test_a_cut_columnar_file_is_refused_in_one_line(tmp_path: Path, kind: str, keep: float) -> None:
    data = contents(kind, [{"text": f"text {i} " * 5} for i in range(200)])
    path = write(tmp_path, f"a.{kind}", data[: int(keep * len(data))])
    with pytest.raises(BadInput, match="cannot be read as") as refused:
        rows(path)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("module", "name", "data"),
    [
        ("pyarrow", "a.parquet", contents("parquet", [{"text": "x"}])),
        ("pyarrow", "a.arrow", contents("arrow", [{"text": "x"}])),
        ("zstandard", "a.jsonl.zst", packed(b'{"text": "x"}\n', ".zst")),
    ],
)
def test_a_missing_package_is_told_with_the_command_that_installs_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: str, name: str, data: bytes
) -> None:
    path = write(tmp_path, name, data)
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(BadInput, match=r"pip install 'fluxtrain\[data\]'"):
        rows(path)


def test_nulls_that_columns_pad_in_are_dropped_at_every_depth(tmp_path: Path) -> None:
    """Two tools of different shape: columns give each the keys of the other."""
    tools = [
        {"type": "function", "function": {"name": "a", "parameters": {"city": {"type": "string"}}}},
        {"type": "function", "function": {"name": "b", "parameters": {"sum": {"type": "number"}}}},
    ]
    calls = [{"function": {"name": "a", "arguments": {"city": "Oslo"}}}]
    others = [{"function": {"name": "b", "arguments": {"sum": 3}}}]
    turns = [
        [CALLER, {"role": "assistant", "content": None, "tool_calls": calls}],
        [CALLER, {"role": "assistant", "content": None, "tool_calls": others}],
    ]
    records = [{"messages": turn, "tools": [tool]} for turn, tool in zip(turns, tools, strict=True)]
    from_lines = rows(write(tmp_path, "a.jsonl", contents("jsonl", records)))
    for kind in ("parquet", "arrow"):
        from_columns = rows(write(tmp_path, f"a.{kind}", contents(kind, records)))
        assert [row.tools for row in from_columns] == [row.tools for row in from_lines]
        assert [row.messages for row in from_columns] == [row.messages for row in from_lines]
    assert from_lines[1].tools == (tools[1],)


CALLER = {"role": "user", "content": "call it"}


def test_a_null_that_a_line_of_json_gives_as_an_argument_stays(tmp_path: Path) -> None:
    call = {"function": {"name": "a", "arguments": {"unit": None}}}
    turns = [CALLER, {"role": "assistant", "content": None, "tool_calls": [call]}]
    [row] = rows(write(tmp_path, "a.jsonl", contents("jsonl", [{"messages": turns}])))
    assert row.messages[1]["tool_calls"][0]["function"]["arguments"] == {"unit": None}


@pytest.mark.parametrize(
    ("data", "said"),
    [
        ("text,text\nx,y\n", "two columns 'text'"),
        ("text,id\nx,1\ny\n", "line 3 has 1 cells and the first line names 2 columns"),
        ('text,id\n"x,1\ny,2\n', "a quote that is opened must be closed"),
        ("words\nx\n", "has no key that names its text, prompt or messages (its keys: words)"),
        ("text\n", "names its columns and has no rows"),
    ],
)
def test_a_table_that_cannot_be_read_is_refused(tmp_path: Path, data: str, said: str) -> None:
    with pytest.raises(BadInput) as refused:
        rows(write(tmp_path, "a.csv", data))
    assert said in str(refused.value)


def test_a_table_is_never_read_as_plain_text(tmp_path: Path) -> None:
    for kind in ("csv", "tsv", "parquet", "arrow"):
        path = write(tmp_path, f"a.{kind}", contents(kind, [{"text": "x"}]))
        with pytest.raises(BadInput, match="never read as plain text"):
            rows(path, format="plain")


@pytest.mark.parametrize("mark", [",", ";", "\t", "|"])
def test_the_mark_between_cells_is_found_in_the_first_line(tmp_path: Path, mark: str) -> None:
    path = write(tmp_path, "a.csv", f'prompt{mark}completion\n"a, b; c"{mark}d\n')
    [row] = rows(path)
    assert [message["content"] for message in row.messages] == ["a, b; c", "d"]


def test_lines_that_cannot_be_read_are_rows_that_cannot_be_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(line_module, "LINE_LIMIT_BYTES", 100)
    good = b'{"text": "good"}\n'
    bad = [b'{"text": "\xff"}\n', b'{"text": "\0"}\n', b'{"text": "' + b"x" * 500 + b'"}\n', b"[\n"]
    path = write(tmp_path, "a.jsonl", good + good.join(bad) + good)
    assert len(rows(path, max_bad_rows=4)) == 5
    with pytest.raises(BadInput) as refused:
        rows(path, max_bad_rows=3)
    said = str(refused.value)
    assert said.startswith("4 rows cannot be used, and data.max_bad_rows is 3")
    for line, what in (
        (2, "is not UTF-8"),
        (4, "a NUL byte"),
        (6, "is longer"),
        (8, "is not JSON"),
    ):
        assert f"line {line} {what}" in said or f"line {line} is binary: {what}" in said


def test_the_share_that_was_read_is_told_of_packed_files_too(tmp_path: Path) -> None:
    from fluxtrain.data.reading.corpus import Reading

    records = [{"text": f"{i} " + "word " * 200} for i in range(4000)]
    for kind, suffix in (("jsonl", ""), ("jsonl", ".gz"), ("csv", ".zst"), ("parquet", "")):
        path = write(tmp_path, f"a.{kind}{suffix}", packed(contents(kind, records), suffix))
        reading = Reading(corpus(path))
        shares = [reading.share for _ in reading]
        assert shares == sorted(shares) or suffix, kind
        assert shares[1999] == pytest.approx(0.5, abs=0.15), (kind, suffix)
        assert reading.share == 1.0


@pytest.mark.parametrize("kind", ["jsonl", "json", "csv", "tsv", "txt"])
def test_a_mark_of_utf8_and_ends_of_lines_of_windows_change_no_row(
    tmp_path: Path, kind: str
) -> None:
    records = [{"text": "eins"}, {"text": "zwölf"}]
    data = b"eins\n<|endoftext|>\nzw\xc3\xb6lf" if kind == "txt" else contents(kind, records)
    data = data.replace(b"\r\n", b"\n").replace(b"\n", b"\r\n")
    path = write(tmp_path, f"a.{kind}", b"\xef\xbb\xbf" + data)
    assert [row.text.strip() for row in rows(path)] == ["eins", "zwölf"]


def test_a_row_over_several_lines_of_a_table_is_named_by_its_first_line(tmp_path: Path) -> None:
    path = write(tmp_path, "a.csv", 'text,id\n"one\ntwo",1\n"three\n",2\nshort\n')
    with pytest.raises(BadInput, match="line 6 has 1 cells"):
        rows(path)
    found = rows(path, max_bad_rows=1)
    assert [row.origin.number for row in found] == [2, 4]
