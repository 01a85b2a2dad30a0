"""Repeated rows are found exactly, in bounded memory, and told with their places."""

from __future__ import annotations

import errno
import json
import tempfile
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fluxtrain.data.reading import duplicates
from fluxtrain.data.reading.corpus import Reading
from fluxtrain.data.reading.duplicates import Duplicates, Place
from fluxtrain.data.reading.repeats import RepeatSearch
from fluxtrain.data.reading.report import Report
from tests.unit.data_files import CHAT, corpus, lines, write


def searched(*paths: Path, border: int | None = None) -> Report:
    """The report of reading these files in order."""
    with RepeatSearch() as search:
        readings = []
        for number, path in enumerate(paths):
            readings.append(Reading(corpus(path), search, number))
            list(readings[-1])
        search.describe(readings[0].report, [str(path) for path in paths], border)
        return readings[0].report


@given(
    numbers=st.lists(st.integers(0, 30), max_size=200),
    spill=st.sampled_from([28, 200, 1 << 20]),
    border=st.integers(0, 3),
)
def test_the_count_is_that_of_a_plain_set_whatever_was_spilled(
    numbers: list[int], spill: int, border: int
) -> None:
    with pytest.MonkeyPatch.context() as patch, Duplicates() as found:
        patch.setattr(duplicates, "SPILL_BYTES", spill)
        seen: dict[int, Place] = {}
        expected = across = 0
        for row, number in enumerate(numbers, start=1):
            place = Place(row * 3 // (len(numbers) + 1), row)
            found.add(number.to_bytes(1, "big") * 16, place)
            earlier = seen.setdefault(number, place)
            expected += earlier != place
            across += earlier.file < border <= place.file
        repeats = found.repeats(border)
    assert (repeats.rows, repeats.across) == (expected, across)
    assert len(repeats.examples) == min(expected, duplicates.EXAMPLES)
    for repeating, repeated in repeats.examples:
        assert numbers[repeating.row - 1] == numbers[repeated.row - 1]
        assert repeated.row < repeating.row


def test_memory_is_bounded_however_many_rows_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(duplicates, "SPILL_BYTES", 1 << 14)
    with Duplicates() as found:
        held = []
        for number in range(20_000):
            found.add(number.to_bytes(16, "little"), Place(0, number + 1))
            held.append(sum(map(len, found._parts)))
        found.add((7).to_bytes(16, "little"), Place(0, 20_001))
        assert max(held) <= 1 << 14
        assert found.repeats().examples == ((Place(0, 20_001), Place(0, 8)),)


def test_white_space_and_capitals_make_no_other_document(tmp_path: Path) -> None:
    path = lines(
        tmp_path, {"text": "Two  mills."}, {"text": "one"}, {"text": " two\nMILLS. "},
        {"text": "two mills"},
    )  # fmt: skip
    assert searched(path).repeated == (
        "repeated documents: 1 of 4 say what an earlier one says (3 repeats 1)"
    )
    chats: list[Any] = [{"messages": CHAT}, {"messages": CHAT}, {"messages": CHAT, "tools": []}]
    assert "2 of 3" in searched(lines(tmp_path, *chats)).repeated
    assert searched(lines(tmp_path, {"text": "a"}, {"text": "b"})).lines() == []


def test_long_documents_are_compared_whole(tmp_path: Path) -> None:
    whole = "the same words. " * 20_000
    path = lines(tmp_path, {"text": whole + "a"}, {"text": whole + "b"}, {"text": whole + "a"})
    assert "1 of 3 say what an earlier one says (3 repeats 1)" in searched(path).repeated


def test_ids_are_unique_within_a_file(tmp_path: Path) -> None:
    first = lines(tmp_path, *({"text": f"a{i}", "id": i} for i in (1, 2, 1)), name="a.jsonl")
    second = lines(tmp_path, *({"text": f"b{i}", "id": i} for i in (1, 2)), name="b.jsonl")
    told = searched(first, second).repeated_ids
    assert told.startswith("repeated ids: 1 rows have the `id` of an earlier row of their file")
    assert f"{first} 3 repeats 1" in told


def test_held_out_documents_that_are_trained_on_are_told(tmp_path: Path) -> None:
    trained = lines(tmp_path, {"text": "a"}, {"text": "b"}, name="a.jsonl")
    held = write(tmp_path, "b.json", json.dumps([{"text": "B"}, {"text": "c"}]))
    assert (
        "held-out documents that are trained on too: 1" in searched(trained, held, border=1).leaked
    )


@pytest.mark.parametrize("at", ["making", "writing", "flushing"])
def test_a_full_temporary_folder_ends_the_search_alone_and_is_told(
    at: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = lines(tmp_path, *({"text": f"row {number % 50}"} for number in range(200)))
    refused = OSError(errno.ENOSPC, "No space left on device")
    made = []

    def temporary_file() -> Mock:
        if at == "making":
            raise refused
        made.append(Mock(**{"seek.return_value": 0}))
        made[-1].write.side_effect = refused if at == "writing" else None
        made[-1].flush.side_effect = made[-1].close.side_effect = refused
        return made[-1]

    monkeypatch.setattr(duplicates, "SPILL_BYTES", 56)
    monkeypatch.setattr("tempfile.TemporaryFile", temporary_file)
    report = searched(path)
    assert report.rows == 200, "every row is read"
    [told] = report.lines()
    assert told.startswith("repeated documents were not looked for: no space left for the hashes")
    assert f"in {tempfile.gettempdir()} (No space left on device; " in told and "TMPDIR" in told
    assert len(made) <= 1, "it is not tried at every row"
