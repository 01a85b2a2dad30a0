"""Repeated rows are found exactly, in bounded memory, and told with their places."""

from __future__ import annotations

import json
import resource
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fluxtrain.data.reading import repeats
from fluxtrain.data.reading.corpus import Reading
from fluxtrain.data.reading.repeats import RepeatSearch
from fluxtrain.data.reading.report import Report
from fluxtrain.data.row import Origin, Row
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


def taken(numbers: list[int], search: RepeatSearch, files: int = 1) -> list[int]:
    """Let the search take one document a number, over some files; return the file of each."""
    at = [place * files // len(numbers) for place in range(len(numbers))]
    for place, (file, number) in enumerate(zip(at, numbers, strict=True), start=1):
        search.take(file, Row(origin=Origin("a.jsonl", place), text=str(number)), {})
    return at


@given(numbers=st.lists(st.integers(0, 30), min_size=1, max_size=200), border=st.integers(0, 3))
def test_the_count_is_that_of_a_plain_set(numbers: list[int], border: int) -> None:
    with RepeatSearch() as search:
        files = taken(numbers, search, files=3)
        found = search.found("documents", border)
    first: dict[int, int] = {}
    expected = across = 0
    for file, number in zip(files, numbers, strict=True):
        if number in first:
            expected += 1
            across += first[number] < border <= file
        first.setdefault(number, file)
    assert (found.rows, found.across) == (expected, across)
    assert bool(found.examples) == bool(expected) and len(found.examples) <= repeats.EXAMPLES
    for _, row, _, earlier in found.examples:
        assert numbers[row - 1] == numbers[earlier - 1] and earlier < row


def test_memory_is_bounded_however_many_rows_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(repeats, "CACHE_KIB", 1 << 10)
    with RepeatSearch() as search:
        taken([*range(100_000)], search)  # what is cached and what the heap keeps is there
        before = resident_bytes()
        taken([*range(100_000, 400_000), 3], search)  # 10 MB of hashes
        assert search.found("documents", 1).rows == 1
        assert resident_bytes() - before < 8 << 20


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


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


def test_a_full_temporary_folder_ends_the_search_alone_and_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = lines(tmp_path, *({"text": f"row {number % 50}"} for number in range(20_000)))
    monkeypatch.setattr(repeats, "CACHE_KIB", 64)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, limits[1]))
    try:
        report = searched(path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert report.rows == 20_000, "every row is read"
    [told] = report.lines()
    assert told.startswith("repeated documents were not looked for: the hashes of the rows cannot")
    assert "TMPDIR" in told
