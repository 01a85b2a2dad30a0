"""Folders, patterns and lists of data, bad rows and their limit, and the account of every key."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fluxtrain.data.containers import texts as texts_module
from fluxtrain.data.reading.corpus import Reading
from fluxtrain.data.reading.report import LISTED
from fluxtrain.data.shapes.keys import CONTENT, USED
from fluxtrain.errors import EXIT_BAD_INPUT, BadInput
from tests.unit.data_files import CHAT, corpus, lines, reported, rows, write


def texts(path: Any, **settings: Any) -> list[str]:
    return [row.text for row in rows(path, **settings)]


def refusal(path: Any, **settings: Any) -> str:
    with pytest.raises(BadInput) as refused:
        rows(path, **settings)
    assert refused.value.exit_code == EXIT_BAD_INPUT
    assert "\n" not in str(refused.value)
    return str(refused.value)


def test_a_folder_is_all_its_readable_files_by_name(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    lines(tmp_path / "b", {"text": "three"}, name="1.jsonl")
    lines(tmp_path, {"text": "one"}, name="a-00001.jsonl")
    write(tmp_path, "a-00002.csv", "text\ntwo\n")
    for name in ("README.md", "LICENSE", "notes.docx", ".hidden.jsonl", "_SUCCESS", "state.json"):
        write(tmp_path, name, "what stands here is not data")
    found, report = reported(tmp_path)
    assert [row.text for row in found] == ["one", "two", "three"]
    assert {Path(name).name for name in report.left_out_files} == {
        "README.md", "LICENSE", "notes.docx", "state.json",
    }  # fmt: skip
    assert "files of the folder that are left out: 4" in report.lines()[-1]


def test_a_folder_with_nothing_readable_names_what_it_holds(tmp_path: Path) -> None:
    for name in ("a.xlsx", "b.docx", "README.md"):
        write(tmp_path, name, "x")
    told = refusal(tmp_path)
    assert "holds no file that can be read (.docx, .md, .xlsx)" in told and ".parquet" in told


def test_a_folder_with_a_test_split_is_not_trained_on_whole(tmp_path: Path) -> None:
    for name in ("train-00000.jsonl", "test-00000.jsonl"):
        lines(tmp_path, {"text": name}, name=name)
    told = refusal(tmp_path)
    assert "data to train on (train-00000.jsonl) and to evaluate on (test-00000.jsonl)" in told
    assert texts(f"{tmp_path}/train*") == ["train-00000.jsonl"], "the cure that is named"


def test_a_pattern_is_every_file_that_matches(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    for name in ("a1.jsonl", "a2.jsonl", "b.jsonl", "deep/a3.jsonl"):
        lines(tmp_path, {"text": name}, name=name)
    assert texts(f"{tmp_path}/a?.jsonl") == ["a1.jsonl", "a2.jsonl"]
    assert len(texts(f"{tmp_path}/**/*.jsonl")) == 4
    assert "matches no file" in refusal(f"{tmp_path}/c*.jsonl")
    odd = lines(tmp_path, {"text": "odd"}, name="[1].jsonl")
    assert texts(odd) == ["odd"], "a file of that name is meant before the pattern"


def test_a_list_is_read_in_its_order_each_file_in_its_own_way(tmp_path: Path) -> None:
    first = lines(tmp_path, {"body": "one"}, name="a.jsonl")
    second = write(tmp_path, "b.log", '{"event": 1}\n')
    entries = [
        {"path": str(first), "columns": {"text": "body"}},
        {"path": str(second), "format": "plain"},
    ]
    assert texts(entries) == ["one", '{"event": 1}\n']


@given(weight=st.floats(0.05, 5.0), count=st.integers(20, 400))
@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_weight_is_how_often_the_rows_of_a_file_are_drawn(
    tmp_path: Path, weight: float, count: int
) -> None:
    path = lines(tmp_path, *({"text": f"{i}"} for i in range(count)))
    entries = [{"path": str(path), "weight": weight}]
    drawn = Counter(texts(entries))
    assert sum(drawn.values()) == pytest.approx(weight * count, abs=4)
    assert all(int(weight) <= drawn[f"{i}"] <= int(weight) + 1 for i in range(count))
    assert drawn == Counter(texts(entries)), "the same in every reading"
    assert reported(entries)[1].rows == count, "counted once"


def test_a_long_text_is_drawn_whole_or_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(texts_module, "SECTION_CHARACTERS", 20)
    path = lines(tmp_path, *({"text": f"{i} words and " * 20} for i in range(20)))
    plain = write(tmp_path, "a.txt", "\n<|endoftext|>\n".join(["words and " * 20] * 20))
    for file in (path, plain):
        found = rows([{"path": str(file), "weight": 0.5}])
        assert sum(row.begins for row in found) == sum(row.ends for row in found) == 10
        assert len(found) > 40


def test_long_texts_of_rows_are_cut_into_pieces_that_say_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(texts_module, "SECTION_CHARACTERS", 100)
    text = "words of a line " * 50 + "\n<|endoftext|>\n" + "more"
    found, report = reported(lines(tmp_path, {"text": "short"}, {"text": text}))
    pieces = found[1:]
    assert "".join(row.text for row in pieces) == text, "a separator is text within a row"
    assert [row.begins for row in pieces] == [True] + [False] * (len(pieces) - 1)
    assert [row.ends for row in pieces] == [False] * (len(pieces) - 1) + [True]
    assert {row.origin.number for row in pieces} == {2} and len(pieces) > 3
    assert report.rows == 2


def test_bad_rows_are_listed_with_file_and_line_before_the_run_is_refused(tmp_path: Path) -> None:
    bad = lines(tmp_path, {"text": "a"}, {"text": 1}, {"text": "b"}, {"text": []}, name="a.jsonl")
    worse = lines(tmp_path, {"text": "c"}, ["no object"], name="b.jsonl")
    told = refusal([str(bad), str(worse)])
    assert told.startswith("3 rows cannot be used, and data.max_bad_rows is 0: ")
    assert f"{bad} line 2: `text` is a number, and it must be a string; line 4: " in told
    assert f"{worse} line 2 is a list" in told
    found, report = reported([str(bad), str(worse)], max_bad_rows=3)
    assert [row.text for row in found] == ["a", "b", "c"]
    assert report.bad == 3 and "bad rows, left out: 3: " in report.lines()[0]
    assert "3 rows cannot be used" in refusal([str(bad), str(worse)], max_bad_rows=2)


def test_reading_stops_soon_where_every_row_is_bad(tmp_path: Path) -> None:
    path = lines(tmp_path, {"text": "a"}, *({"text": i} for i in range(10_000)))
    reading = Reading(corpus(path))
    with pytest.raises(BadInput, match="10 or more rows cannot be used") as refused:
        list(reading)
    assert reading.report.bad == LISTED
    assert "line 2: " in str(refused.value) and "line 3" not in str(refused.value)
    reading = Reading(corpus(path, max_bad_rows=50))
    with pytest.raises(BadInput, match="51 or more rows"):
        list(reading)


def test_a_bad_first_row_does_not_hide_the_shape(tmp_path: Path) -> None:
    path = write(tmp_path, "a.jsonl", '{"te\n{"words": 1}\n{"text": "good"}\n')
    assert texts(path, max_bad_rows=2) == ["good"]
    assert "line 1 is not JSON" in refusal(write(tmp_path, "b.jsonl", '{"te\n{"xt\n'))


keys = st.text("abcdefgh_", min_size=1, max_size=6).filter(
    lambda key: key not in CONTENT and not any(key in used for used in USED.values())
)
extras = st.dictionaries(keys, st.none() | st.integers() | st.text(max_size=5), max_size=4)
VALID: list[dict[str, Any]] = [
    {"text": "x"},
    {"messages": CHAT},
    {"prompt": "how", "completion": "so"},
    {"instruction": "how", "output": "so"},
    {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]},
]


@given(base=st.sampled_from(VALID), extra=st.lists(extras, min_size=1, max_size=6))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_every_key_that_is_not_used_is_counted_with_its_rows(
    tmp_path: Path, base: dict[str, Any], extra: list[dict[str, Any]]
) -> None:
    path = lines(tmp_path, *({**base, **one} for one in extra))
    _, report = reported(path)
    expected = Counter(key for one in extra for key, value in one.items() if value is not None)
    assert report.ignored == expected
    assert all(f"`{key}` (in {count:,} rows)" in report.lines()[0] or len(expected) > 12
               for key, count in expected.items())  # fmt: skip


@pytest.mark.parametrize("base", VALID)
@pytest.mark.parametrize("key", sorted(CONTENT))
def test_a_key_that_says_something_is_used_or_refused(
    tmp_path: Path, base: dict[str, Any], key: str
) -> None:
    """Never is it left out in silence: what comes out is another row, or a refusal names it."""
    if key in base:
        return
    plain = rows(lines(tmp_path, base, name="plain.jsonl"))
    path = lines(tmp_path, base, {**base, key: "something new"})
    try:
        changed = rows(path)
    except BadInput as refused:
        assert f"`{key}`" in str(refused)
        return
    assert changed[1].messages != plain[0].messages or changed[1].tools != plain[0].tools


def test_blank_texts_are_counted(tmp_path: Path) -> None:
    _, report = reported(lines(tmp_path, {"text": "x"}, {"text": " \n"}, {"text": ""}))
    assert (report.rows, report.blank) == (1, 2)
    assert report.lines() == ["texts without words, left out: 2"]


def test_keys_of_messages_are_counted_or_refused(tmp_path: Path) -> None:
    turns = [{**CHAT[0], "id": 7, "timestamp": None}, {**CHAT[1], "id": 8}]
    _, report = reported(lines(tmp_path, {"messages": turns}))
    assert report.ignored == {"id of messages": 1}


def test_a_key_that_is_ignored_by_name_is_counted_too(tmp_path: Path) -> None:
    path = lines(tmp_path, {"text": "x", "label": 1}, {"text": "y"})
    assert "line 1 has the key `label`" in refusal(path)
    _, report = reported(path, ignore=["label"])
    assert report.ignored == {"label": 1}


def test_a_nested_list_of_rows_is_refused_with_its_keys(tmp_path: Path) -> None:
    path = write(tmp_path, "a.json", json.dumps({"version": 1, "data": [{"text": "x"}]}, indent=1))
    assert (
        "has no key that names its text, prompt or messages (its keys: version, data)"
        in refusal(path)
    )
