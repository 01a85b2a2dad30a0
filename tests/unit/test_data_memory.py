"""Every container is read in memory that does not hold the file."""

from __future__ import annotations

import gzip
from pathlib import Path

import pyarrow
import pytest
from pyarrow import parquet

from tests.unit.data_files import read_capped

ROWS = 60_000
TEXT = "the river runs past an old mill " * 30
MIB = 1 << 20
HEADS = {"jsonl": "", "csv": "text,id\n", "txt": ""}
LINES = {
    "jsonl": '{{"text": "{text}", "id": {number}}}\n',
    "csv": '"{text}",{number}\n',
    "txt": "{text}\n<|endoftext|>\n",
}


@pytest.mark.thinned(1)
@pytest.mark.parametrize("kind", LINES)
def test_a_file_of_lines_is_read_in_memory_that_does_not_hold_it(tmp_path: Path, kind: str) -> None:
    path = tmp_path / f"a.{kind}"
    with path.open("w") as file:
        file.write(HEADS[kind])
        file.writelines(LINES[kind].format(text=TEXT, number=i) for i in range(ROWS))
    assert path.stat().st_size > 55 * MIB
    count, characters, peak_bytes = read_capped(path, 52 * MIB)
    assert (count, characters) == (ROWS, ROWS * (len(TEXT) + (kind == "txt")))
    assert peak_bytes < 40 * MIB


def test_a_packed_file_is_unpacked_piece_by_piece(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl.gz"
    with gzip.open(path, "wt", compresslevel=1) as file:
        file.writelines(LINES["jsonl"].format(text=TEXT, number=i) for i in range(ROWS))
    assert path.stat().st_size < 4 * MIB, "it is a hundred times as large unpacked"
    count, _, peak_bytes = read_capped(path, 96 * MIB)
    assert count == ROWS and peak_bytes < 64 * MIB


def test_of_a_row_group_only_some_rows_are_held(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    table = pyarrow.table({"text": [f"{i} {TEXT}" for i in range(4 * ROWS)]})
    parquet.write_table(
        table, path, compression="none", use_dictionary=False, row_group_size=4 * ROWS
    )
    assert path.stat().st_size > 220 * MIB
    count, _, peak_bytes = read_capped(path, 8 << 30)  # pyarrow reserves addresses by gigabytes
    assert count == 4 * ROWS and peak_bytes < 160 * MIB
