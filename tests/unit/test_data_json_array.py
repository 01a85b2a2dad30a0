"""Arrays of JSON are read in a window: right at every size of it, and in bounded memory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fluxtrain.data.containers import json_rows
from fluxtrain.data.containers.json_rows import json_values
from fluxtrain.data.containers.record import Problem, Record
from fluxtrain.data.containers.streams import Source
from fluxtrain.errors import BadInput
from tests.unit.data_files import read_capped, write

values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8) | st.floats(allow_nan=False),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=6,
)
objects = st.dictionaries(st.text(max_size=4), values, max_size=4)


def read(path: Path) -> list[Record | Problem]:
    with Source(path) as source:
        return list(json_values(source))


def found(path: Path) -> list[Any]:
    return [item.values if isinstance(item, Record) else item for item in read(path)]


@given(
    records=st.lists(objects, max_size=6),
    window=st.integers(1, 40),
    indent=st.sampled_from([None, 0, 3]),
    plain=st.booleans(),
)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_the_objects_are_those_of_the_array_at_every_size_of_the_window(
    tmp_path: Path, records: list[dict[str, Any]], window: int, indent: int | None, plain: bool
) -> None:
    path = write(tmp_path, "a.json", json.dumps(records, indent=indent, ensure_ascii=plain))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_rows, "WINDOW_BYTES", window)
        assert found(path) == records


@given(records=st.lists(objects, min_size=1, max_size=4), window=st.integers(1, 40))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_objects_over_several_lines_are_read_without_an_array(
    tmp_path: Path, records: list[dict[str, Any]], window: int
) -> None:
    text = "\n".join(json.dumps(record, indent=2) for record in records)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_rows, "WINDOW_BYTES", window)
        assert found(write(tmp_path, "a.json", text)) == records


@given(records=st.lists(objects, min_size=1, max_size=4), data=st.data())
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_an_array_that_is_cut_anywhere_is_refused(
    tmp_path: Path, records: list[dict[str, Any]], data: st.DataObject
) -> None:
    text = json.dumps(records)
    cut = data.draw(st.integers(1, len(text) - 1))
    with pytest.raises(BadInput, match="is not JSON"):
        read(write(tmp_path, "a.json", text[:cut]))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('[{"a": 1} {"a": 2}]', "row 1 (line 1) is not JSON: a comma or ] must follow"),
        ('[{"a": 1},\n{"a": 2,}]', "row 2 (line 2) is not JSON: "),
        ('[{"a": 1},\n\n{"a": tru}]', "at line 3"),
        ('[{"a": 1}]\n[{"a": 2}]', "goes on behind its array (line 2)"),
        ('[{"a": ' + "[" * 100_000, "nested too deeply"),
        ('[{"a": ' + "9" * 5000 + "}]", "thousands of digits"),
    ],
)
def test_what_is_no_array_of_objects_is_refused_with_its_place(
    tmp_path: Path, text: str, said: str
) -> None:
    with pytest.raises(BadInput) as refused:
        read(write(tmp_path, "a.json", text))
    assert said in str(refused.value)


def test_rows_that_are_no_objects_leave_the_others_readable(tmp_path: Path) -> None:
    first, number, doubled, half, last = read(
        write(tmp_path, "a.json", '[{"a": 1}, 12, {"b": 1, "b": 2}, {"c": "\\ud83d"}, {"d": 4}]')
    )
    assert isinstance(first, Record) and isinstance(last, Record)
    assert str(number).endswith("row 2 is a number, and each row must be a JSON object")
    assert "row 3 has the key 'b' twice" in str(doubled)
    assert "row 4 holds \\ud83d, half of a pair" in str(half)
    assert last.origin.number == 5


def test_a_row_without_end_is_refused_before_memory_is_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(json_rows, "ROW_LIMIT_CHARACTERS", 1 << 20)
    text = '[{"a": "x"}, {"a": "' + "x" * (8 << 20) + '"}]'
    with pytest.raises(BadInput, match=r"row 2 is longer than 1\.05 M characters"):
        read(write(tmp_path, "a.json", text))


def write_array(path: Path, size_bytes: int) -> int:
    """Write an array of about this size; return the number of its rows."""
    row = json.dumps({"text": "the river runs past an old mill " * 30, "id": 7})
    block = ",\n".join([row] * 1000)
    blocks = max(1, size_bytes // len(block))
    with path.open("w") as file:
        file.write("[")
        for number in range(blocks):
            file.write((",\n" if number else "") + block)
        file.write("]\n")
    return blocks * 1000


def test_an_array_is_read_in_memory_that_does_not_hold_it(tmp_path: Path) -> None:
    path = tmp_path / "large.json"
    expected = write_array(path, 96 << 20)
    count, characters, peak_bytes = read_capped(path, 128 << 20)
    assert (count, characters) == (expected, expected * 960)
    assert peak_bytes < 48 << 20
