"""The rows that are looked at come from everywhere in a long file, at no cost."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fluxtrain.data.reading import sampling
from fluxtrain.data.reading.corpus import Reading
from fluxtrain.data.reading.sampling import first_rows
from fluxtrain.errors import BadInput
from tests.unit.data_files import corpus, packed, write


@pytest.fixture(autouse=True)
def _long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampling, "LONG_BYTES", 1 << 12)
    monkeypatch.setattr(sampling, "DOCUMENTS", 64)


def sorted_lines(count: int) -> bytes:
    return "".join(json.dumps({"text": "mill " * (1 + i // 10), "id": i}) + "\n"
                   for i in range(count)).encode()  # fmt: skip


def test_rows_of_a_file_sorted_by_length_come_from_everywhere(tmp_path: Path) -> None:
    path = write(tmp_path, "a.jsonl", sorted_lines(1000))
    rows, share = first_rows(corpus(path))
    lengths = [len(row.text) for row in rows]
    every = [len(row.text) for row in Reading(corpus(path))]
    assert 40 <= len(rows) <= 64 and lengths == sorted(lengths)
    assert lengths[0] == 5 and lengths[-1] > max(every) * 0.9
    assert len(set(map(id, rows))) == len({row.text for row in rows}) or len(rows) > 1
    assert len(rows) / share == pytest.approx(1000, rel=0.6)  # long rows fill more bytes
    assert str(rows[0].origin) == f"{path} line 1"
    offset = rows[-1].origin.number
    assert str(rows[-1].origin) == f"{path} byte {offset}"
    line = path.read_bytes()[offset:].partition(b"\n")[0]
    assert json.loads(line)["text"] == rows[-1].text


def test_short_and_packed_files_are_read_from_their_beginning(tmp_path: Path) -> None:
    short = write(tmp_path, "a.jsonl", sorted_lines(20))
    rows, share = first_rows(corpus(short))
    assert (len(rows), share) == (20, 1.0)
    rows, share = first_rows(
        corpus(write(tmp_path, "b.jsonl.gz", packed(sorted_lines(900), ".gz")))
    )
    assert [row.origin.number for row in rows] == list(range(1, 65)) and share < 1


def test_few_long_rows_are_taken_once(tmp_path: Path) -> None:
    data = "".join(json.dumps({"text": f"{i} " + "mill " * 4000}) + "\n" for i in range(5))
    rows, share = first_rows(corpus(write(tmp_path, "a.jsonl", data)))
    texts = [row.text[:9] for row in rows if row.begins]
    assert len(texts) == len(set(texts)) and 0 < share <= 1


def test_a_bad_row_in_the_middle_is_named_by_its_place(tmp_path: Path) -> None:
    good = sorted_lines(300)
    path = write(tmp_path, "a.jsonl", good + b'{"text": 3}\n' * 3000)
    with pytest.raises(BadInput, match=r"a.jsonl byte \d+: `text` is a number"):
        first_rows(corpus(path))
