"""Columns with other names than ours are taken where one reading is meant, else each is offered."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fluxtrain.config.text import apply_overrides
from fluxtrain.data.row import Row
from fluxtrain.data.shapes.columns import UnclearColumns
from fluxtrain.errors import BadInput
from tests.unit.data_files import CHAT, corpus, lines, reported, rows, write

PAIRS = [
    ("question", "answer"), ("prompt", "response"), ("instruction", "response"),
    ("Question", "Answer"), ("input", "output"), ("user", "assistant"), ("query", "response"),
    ("Instruction", "Output"), ("PROMPT", "Completion"), ("problem", "solution"),
    ("human", "gpt"), ("source", "target"), ("inputs", "targets"), ("Input", "Output"),
]  # fmt: skip


def said(row: Row) -> list[str]:
    return [f"{message['role']}: {message['content']}" for message in row.messages]


@pytest.mark.parametrize("kind", ["csv", "tsv", "jsonl"])
@pytest.mark.parametrize("pair", PAIRS, ids=" ".join)
def test_a_question_and_its_answer_are_taken_by_their_names(
    tmp_path: Path, pair: tuple[str, str], kind: str
) -> None:
    asked, answered = pair
    if kind == "jsonl":
        path = lines(tmp_path, {asked: "how?", answered: "so"})
    else:
        between = "," if kind == "csv" else "\t"
        path = write(tmp_path, f"qa.{kind}", f" {asked} {between}{answered}\nhow?{between}so\n")
    [row] = rows(path)
    assert said(row) == ["user: how?", "assistant: so"] and row.weights == (0.0, 1.0)
    told = corpus(path).parts[0].because
    assert f"`{answered}` is taken as the answer to `{asked}` (data.columns={{" in told
    assert "\n" not in told


@pytest.mark.parametrize(
    ("record", "expected"),
    [
        ({"question": "q", "context": "c", "answer": "a"}, ["user: q\nc", "assistant: a"]),
        ({"instruction": "q", "context": "c", "response": "a"}, ["user: q\nc", "assistant: a"]),
        ({"Instruction": "q", "Input": "c", "Response": "a"}, ["user: q\nc", "assistant: a"]),
        ({"system_prompt": "s", "question": "q", "response": "a"},
         ["system: s", "user: q", "assistant: a"]),
        ({"System": "s", "Prompt": "q", "Answer": "a"}, ["system: s", "user: q", "assistant: a"]),
        ({"id": "7", "question": "q", "answer": "a", "source": "web", "topic": "x"},
         ["user: q", "assistant: a"]),
        ({"Messages": CHAT}, ["user: 2+2?", "assistant: 4"]),
    ],
)  # fmt: skip
def test_what_stands_beside_the_question_is_taken_too(
    tmp_path: Path, record: dict[str, Any], expected: list[str]
) -> None:
    [row] = rows(lines(tmp_path, record))
    assert said(row) == expected


@pytest.mark.parametrize("record", [{"content": "words"}, {"Text": "words", "url": "x", "id": "3"}])
def test_a_lone_text_is_taken_by_its_name(tmp_path: Path, record: dict[str, Any]) -> None:
    [row] = rows(lines(tmp_path, record))
    assert row.text == "words"
    [titled] = rows(lines(tmp_path, {"Title": "head", "body": "words"}))
    assert titled.text == "head\nwords"


def test_a_cell_that_is_empty_in_the_first_row_is_a_column_all_the_same(tmp_path: Path) -> None:
    path = write(tmp_path, "qa.csv", "question,context,answer\nq,,a\nq2,c2,a2\n")
    assert [said(row)[0] for row in rows(path)] == ["user: q", "user: q2\nc2"]


UNCLEAR = [
    {"question": "q", "query": "r", "answer": "a"},
    {"problem": "q", "solution": "s", "answer": "a"},
    {"prompt": "p", "input": "q", "output": "a"},
    {"question": "q", "Question": "r", "answer": "a"},
    {"instruction": "q", "context": "c", "input": "i", "response": "a"},
    {"user": "name", "response": "a"},
    {"article": "long", "highlights": "short"},
    {"content": "one", "body": "another"},
    {"my: question": "?", "Question, please": "q", "prompt": "p", "query": "x", "answer": "a"},
]


@pytest.mark.parametrize("record", UNCLEAR, ids=" ".join)
@pytest.mark.parametrize("kind", ["auto", "alpaca", "completion", "text"])
def test_a_second_reading_is_not_guessed_and_each_that_is_named_is_accepted(
    tmp_path: Path, record: dict[str, Any], kind: str
) -> None:
    path = lines(tmp_path, record)
    with pytest.raises(UnclearColumns) as refused:
        rows(path, format=kind)
    readings = refused.value.readings
    assert readings or kind != "auto"
    for reading in readings:
        assert all(setting in str(refused.value) for setting in reading.settings)
        made = apply_overrides({}, list(reading.settings))["data"]
        assert made["columns"] == dict(reading.columns)
        [row], _ = reported(path, **made)
        assert row.text or row.messages[-1]["content"] in record.values()
    assert len({reading.settings for reading in readings}) == len(readings)


def test_columns_that_are_set_and_keys_that_are_ours_win(tmp_path: Path) -> None:
    path = lines(tmp_path, {"question": "q", "answer": "a", "note": "n"})
    [row] = rows(path, columns={"prompt": "note", "completion": "answer"}, ignore=["question"])
    assert said(row) == ["user: n", "assistant: a"]
    path = lines(tmp_path, {"prompt": "p", "completion": "c", "Question": "other"})
    assert said(rows(path)[0]) == ["user: p", "assistant: c"]


def test_a_column_that_says_something_and_has_no_place_is_refused_with_the_cure(
    tmp_path: Path,
) -> None:
    path = lines(tmp_path, {"question": "q", "answer": "a", "label": "bad"})
    with pytest.raises(BadInput, match=r"has the key `label`.*name it in data\.ignore"):
        rows(path)
    assert said(rows(path, ignore=["label"])[0]) == ["user: q", "assistant: a"]


@pytest.mark.parametrize("form", ["text", "messages", "sharegpt", "alpaca", "completion"])
def test_a_format_that_no_row_has_is_said_once(tmp_path: Path, form: str) -> None:
    path = write(tmp_path, "a.csv", "one,two\n" + "x,y\n" * 40)
    with pytest.raises(BadInput) as refused:
        rows(path, format=form)
    assert str(refused.value).count("no row has `") == 1
    assert "; its keys are one, two: leave out data.format" in str(refused.value)


def test_rows_that_are_refused_for_the_same_reason_are_told_once(tmp_path: Path) -> None:
    path = lines(tmp_path, {"text": "good"}, *({"words": "x"} for _ in range(20)))
    with pytest.raises(BadInput) as refused:
        rows(path)
    assert str(refused.value).count("has no `text`") == 1
    assert "line 2 has no `text`: its keys are words (and 9 more rows)" in str(refused.value)
    assert "10 or more rows" in str(refused.value)


def test_a_header_without_rows_is_told_as_such(tmp_path: Path) -> None:
    for name, text in (("a.csv", "question,answer\n"), ("a.tsv", "question\tanswer\n\n")):
        with pytest.raises(BadInput, match="names its columns and has no rows"):
            rows(write(tmp_path, name, text))
    with pytest.raises(BadInput, match="is empty"):
        rows(write(tmp_path, "a.jsonl", "\n\n"))


def test_columns_whose_names_say_nothing_can_be_chosen(tmp_path: Path) -> None:
    path = write(tmp_path, "fa.csv", "id,frage,antwort\n1,Wo?,Da\n2,Wer?,Ich\n")
    with pytest.raises(
        UnclearColumns, match=r"columns=\{prompt: frage, completion: antwort\}"
    ) as no:
        rows(path)
    found = []
    for reading in no.value.readings:
        made = apply_overrides({}, list(reading.settings))["data"]
        first, *_ = rows(path, **made)
        found.append(first.text or [*map(str, said(first))])
    both = [["user: Wo?", "assistant: Da"], ["user: Da", "assistant: Wo?"]]
    assert found == [*both, "Wo?", "Da"]


def test_columns_that_differ_in_case_alone_are_told_with_the_way_to_the_other(
    tmp_path: Path,
) -> None:
    path = write(tmp_path, "qa.csv", "Prompt,prompt,completion\na,b,c\n")
    [row], report = reported(path)
    assert said(row) == ["user: b", "assistant: c"]
    [told] = [line for line in report.lines() if "case alone" in line]
    made = apply_overrides({}, told.partition(" set ")[2].split(" with "))["data"]
    assert said(rows(path, **made)[0]) == ["user: a", "assistant: c"]


def test_a_null_is_told_as_one_and_not_as_a_missing_key(tmp_path: Path) -> None:
    path = lines(tmp_path, {"prompt": "a", "completion": "b"}, {"prompt": None, "completion": "b"})
    with pytest.raises(BadInput, match="line 2 has null for `prompt`.*max_bad_rows"):
        rows(path)
