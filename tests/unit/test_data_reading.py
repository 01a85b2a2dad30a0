"""Data files: what format they have, their documents, and every way in which they can be bad."""

from __future__ import annotations

import json
import subprocess
import sys
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fluxtrain.data.containers import lines, texts
from fluxtrain.data.reading.corpus import Corpus, Reading
from fluxtrain.data.reading.request import read_request
from fluxtrain.data.reading.sampling import estimated_tokens
from fluxtrain.data.row import Row
from fluxtrain.errors import EXIT_BAD_INPUT, BadInput

CHAT = [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}]


def _file(folder: Path, name: str, content: bytes | str) -> Path:
    path = folder / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def corpus(path: Path, **settings: Any) -> Corpus:
    return read_request({"path": str(path), **settings}).corpus()


def read(path: Path, format: str = "auto", **settings: Any) -> list[Row]:
    return list(Reading(corpus(path, format=format, **settings)))


def _lines(folder: Path, *records: Any) -> Path:
    return _file(folder, "data.jsonl", "".join(json.dumps(record) + "\n" for record in records))


def _refusal(path: Path, format: str | None = None) -> str:
    with pytest.raises(BadInput) as caught:
        read(path, format or "auto")
    assert caught.value.exit_code == EXIT_BAD_INPUT
    return str(caught.value)


@pytest.mark.parametrize(
    ("name", "content", "expected", "reason"),
    [
        ("a.txt", '{"event": "still text"}\n', ("text", "text"), "its name ends in .txt"),
        ("a.jsonl", '{"text": "x"}\n', ("json lines", "text"), "its first row has `text`"),
        ("a.jsonl", json.dumps({"messages": CHAT}), ("json lines", "messages"), "`messages` with"),
        ("a.json", '{"text": "x"}\n', ("json lines", "text"), "`text`"),
        ("a.json", '[{"text": "x"}]', ("json array", "text"), "begins with ["),
        ("a.json", '{\n "text": "x"\n}\n', ("json array", "text"), "over several lines"),
        ("unnamed", "Once upon a time\n", ("text", "text"), "not a JSON object"),
        ("unnamed", '{"text": "x"}', ("json lines", "text"), "`text`"),
        ("unnamed", '[\n{"text": "x"}]', ("json array", "text"), "`text`"),
        ("a.csv", "text,id\nx,1\n", ("csv", "text"), "its name ends in .csv"),
        ("a.tsv", "prompt\tcompletion\nx\ty\n", ("tsv", "completion"), "`prompt` and"),
    ],
)
def test_container_and_shape_come_with_their_reasons(
    tmp_path: Path, name: str, content: str, expected: tuple[str, str], reason: str
) -> None:
    [part] = corpus(_file(tmp_path, name, content)).parts
    assert (part.container, part.shape) == expected
    assert reason in part.because


def test_the_readers_of_the_app_need_neither_torch_nor_numpy_nor_transformers() -> None:
    code = (
        "import sys, fluxtrain.data.reading.request, fluxtrain.data.reading.sampling\n"
        "named = {'torch', 'numpy', 'transformers', 'tokenizers', 'pyarrow', 'datasets'}\n"
        "heavy = named & set(sys.modules)\n"
        "sys.exit(str(heavy) if heavy else 0)"
    )
    engine = str(Path(texts.__file__).parents[3])
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={"PYTHONPATH": engine},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_texts_and_conversations_come_in_file_order_with_their_lines(tmp_path: Path) -> None:
    path = _lines(tmp_path, {"text": "one"}, {"text": "   "}, {"text": "two", "id": 7})
    assert [(d.origin.number, d.text) for d in read(path)] == [(1, "one"), (3, "two")]
    chats = _file(tmp_path, "chat.jsonl", "\n" + json.dumps({"messages": CHAT}))
    (chat,) = read(chats)
    assert chat.origin.number == 2
    assert list(chat.messages) == CHAT


def test_separator_lines_end_documents(tmp_path: Path) -> None:
    path = _file(tmp_path, "a.txt", "one\nmore\n<|endoftext|>\n\n<|endoftext|>\ntwo")
    found = list(read(path))
    assert [(d.origin.number, d.text, d.ends) for d in found] == [
        (1, "one\nmore\n", True),
        (6, "two", True),
    ]


@given(
    paragraphs=st.lists(
        st.text(st.sampled_from("ab é\n"), max_size=40).filter(str.strip), min_size=1, max_size=40
    ),
    section=st.integers(1, 60),
)
def test_sections_of_a_long_text_are_the_text_and_only_the_last_is_complete(
    tmp_path_factory: pytest.TempPathFactory, paragraphs: list[str], section: int
) -> None:
    text = "\n\n".join(paragraphs)
    path = _file(tmp_path_factory.mktemp("text"), "a.txt", text)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(texts, "SECTION_CHARACTERS", section)
        found = read(path, "text")
    assert "".join("".join(d.text for d in found).split()) == "".join(text.split())
    assert [d.ends for d in found] == [False] * (len(found) - 1) + [True]
    assert all(len(d.text) <= 4 * section + 1 for d in found)


def test_a_long_line_is_cut_before_white_space(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(texts, "SECTION_CHARACTERS", 100)
    line = "head\n" + "words of a line " * 100 + "x" * 450 + "\nafter\n"
    found = list(read(_file(tmp_path, "a.txt", line)))
    assert "".join(d.text for d in found) == line
    assert [d.ends for d in found] == [False] * (len(found) - 1) + [True]
    of_words = [d.text for d in found if "words" in d.text]
    assert len(of_words) >= 8 and all(text.startswith(" ") for text in of_words[1:])
    assert all(d.origin.number == 2 for d in found[1:]) and max(len(d.text) for d in found) <= 210


def test_a_missing_file_and_a_directory_are_named(tmp_path: Path) -> None:
    assert "does not exist" in _refusal(tmp_path / "no.txt")
    assert "holds no file that can be read (it is empty)" in _refusal(tmp_path)


@pytest.mark.parametrize("content", [b"", b"\n \n\t\n"])
@pytest.mark.parametrize("format", [None, "text", "plain", "messages"])
def test_an_empty_file_is_refused_in_every_format(
    tmp_path: Path, content: bytes, format: str | None
) -> None:
    assert "is empty" in _refusal(_file(tmp_path, "a.txt", content), format)


def test_a_binary_file_is_refused_with_the_offset_of_the_nul(tmp_path: Path) -> None:
    message = _refusal(_file(tmp_path, "a.txt", b"fine\nalso\n\x7fELF\0\0"))
    assert "binary" in message
    assert "line 3" in message and "offset 14" in message


def test_text_that_is_not_utf8_is_refused_with_byte_and_offset(tmp_path: Path) -> None:
    message = _refusal(_file(tmp_path, "a.txt", b"caf\xc3\xa9\ncaf\xe9 au lait\n"))
    assert "line 2 is not UTF-8: byte 0xe9 at offset 9" in message
    assert "iconv" in message


def test_an_endless_line_is_refused_without_loading_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert lines.LINE_LIMIT_BYTES == 64 << 20
    monkeypatch.setattr(lines, "LINE_LIMIT_BYTES", 1 << 20)
    path = tmp_path / "huge.jsonl"
    with path.open("wb") as file:
        file.write(b'{"text": "')
        for _ in range(64):
            file.write(b"x" * (1 << 20))
    tracemalloc.start()
    message = _refusal(path)
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert "line 1 is longer than 1.00 MiB" in message
    assert peak_bytes < 4 << 20  # of 64 MiB


def test_malformed_json_is_refused_with_line_and_column(tmp_path: Path) -> None:
    path = _file(tmp_path, "a.jsonl", '{"text": "a"}\n{"text": "b"\n')
    message = _refusal(path)
    assert "line 2 is not JSON" in message
    assert "column" in message


def test_a_number_without_end_is_refused_in_words_of_our_own(tmp_path: Path) -> None:
    said = _refusal(_file(tmp_path, "a.jsonl", '{"text": "x", "id": ' + "9" * 5000 + "}\n"))
    assert "line 1 has a number of thousands of digits" in said and "sys." not in said


def test_a_missing_key_names_the_keys_that_are_there(tmp_path: Path) -> None:
    message = _refusal(_lines(tmp_path, {"words": "x", "id": 1}))
    assert (
        "line 1 has no key that names its text, prompt or messages (its keys: words, id)" in message
    )
    later = _refusal(_lines(tmp_path, {"text": "x"}, {"words": "y"}))
    assert "line 2 has no `text`: its keys are words" in later
    wrong = _refusal(_lines(tmp_path, {"text": "x"}), "messages")
    assert "(data.format=messages), and no row has `messages`; its keys are text" in wrong


def test_a_text_that_is_no_string_is_refused(tmp_path: Path) -> None:
    assert "`text` is a number" in _refusal(_lines(tmp_path, {"text": "x"}, {"text": 3}))
    assert "line 2 has null for `text`" in _refusal(_lines(tmp_path, {"text": "x"}, {"text": None}))


@pytest.mark.parametrize(
    ("messages", "complaint"),
    [
        ([], "`messages` is empty"),
        ("hello", "`messages` is a string"),
        (["hello"], "message 1 is a string"),
        ([{"content": "hi"}], "message 1 has no `role`"),
        ([{"from": "human", "value": "hi"}], "of another shape (ShareGPT"),
        ([{"role": "robot", "content": "hi"}], "role 'robot' is not one of"),
        ([{"role": "user", "content": "hi"}], "no message has the role assistant"),
        ([CHAT[0], {"role": "assistant"}], "message 2: `content` is null or missing"),
        ([CHAT[0], {"role": "assistant", "content": [1]}], "message 2: `content[0]` is a number"),
        ([CHAT[0], {"role": "assistant", "text": "4"}], "message 2 has the key `text`"),
    ],
)
def test_unusable_messages_are_refused_with_line_and_place(
    tmp_path: Path, messages: Any, complaint: str
) -> None:
    message = _refusal(_lines(tmp_path, {"messages": CHAT}, {"messages": messages}))
    assert "line 2" in message
    assert complaint in message


def test_an_unknown_format_is_refused(tmp_path: Path) -> None:
    assert "not one of" in _refusal(_file(tmp_path, "a.txt", "x"), "parquet")


def test_an_estimate_reads_only_the_start_of_a_file(tmp_path: Path) -> None:
    good = json.dumps({"text": "word " * 50}) + "\n"
    path = _file(tmp_path, "a.jsonl", good * 100 + "damaged far below\n")
    found = estimated_tokens(corpus(path))
    assert found == pytest.approx(100 * 250 / 4, rel=0.02)
    with pytest.raises(BadInput, match="no row has `messages`"):
        estimated_tokens(corpus(path, format="messages"))


@pytest.mark.parametrize(
    "record", [{"text": "x"}, {"messages": CHAT}, {"prompt": "a", "completion": "b"}]
)
def test_rows_in_a_file_that_is_named_as_text_are_not_trained_with_their_marks(
    tmp_path: Path, record: Any
) -> None:
    path = _file(tmp_path, "a.txt", json.dumps(record) + "\n")
    assert "is named as text, and its first line is an object with `" in _refusal(path)
    [row] = read(path, "plain")
    assert row.text.startswith("{")
