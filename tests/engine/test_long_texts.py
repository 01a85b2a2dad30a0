"""Texts go to the tokenizer in calls of bounded size; what is too long for that is a bad row."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from fluxtrain.data.encoding import tokenizer as tokenizing
from fluxtrain.data.encoding.encode import Encoder
from fluxtrain.data.encoding.tokenizer import TokenKinds
from fluxtrain.data.row import Origin, Row
from fluxtrain.errors import BadInput
from tests.engine.conftest import SENTENCES
from tests.engine.mask_grounds import TEMPLATES, tokenizer_of


def test_many_texts_go_to_the_tokenizer_in_groups_and_keep_their_order(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    texts = [" ".join(SENTENCES[:n]) for n in range(1, 9)] * 3
    kinds, calls = TokenKinds(tokenizer_of("byte-level", None)), list[int]()
    whole, encoded = kinds.encode(texts), tokenizing.encoded

    def counted(tokenizer: Any, some: Sequence[str], **options: Any) -> list[list[int]]:
        calls.append(sum(map(len, some)))
        return encoded(tokenizer, some, **options)

    monkeypatch.setattr(tokenizing, "encoded", counted)
    monkeypatch.setattr(tokenizing, "AT_ONCE_CHARACTERS", 600)
    assert kinds.encode(texts) == whole
    assert max(calls) <= 600 and len(calls) > 3
    assert kinds.encode([]) == [] and kinds.encode([""]) == [[]]


def talk(*said: str) -> Row:
    roles = ["user", "assistant"] * len(said)
    messages: Any = tuple(
        {"role": role, "content": words} for role, words in zip(roles, said, strict=False)
    )
    weights = tuple(float(one["role"] == "assistant") for one in messages)
    return Row(origin=Origin("x.jsonl", 1), messages=messages, weights=weights)


def test_a_conversation_beyond_the_limit_is_a_bad_row_with_the_cure(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tokenizing, "LARGEST_CHARACTERS", 500)
    tokenizer = tokenizer_of("byte-level", TEMPLATES["chatml"])
    rows = [talk("a " * 400, "b"), talk("a", "b")]
    with pytest.raises(BadInput, match=r"x.jsonl.* 801 characters, and at most 500 .* divide"):
        list(Encoder(tokenizer).samples(rows))
    encoder = Encoder(tokenizer, limit=1)
    assert [number for _, number in encoder.samples(rows)] == [1]
    assert encoder.notes.refused == 1
    plain = [Row(origin=row.origin, messages=row.messages, weights=row.weights, plain=True)
             for row in rows]  # fmt: skip
    encoder = Encoder(tokenizer_of("byte-level", None), limit=1)
    assert [number for _, number in encoder.samples(plain)] == [1]


def test_a_row_of_so_many_answers_that_it_takes_minutes_is_refused() -> None:
    row = talk(*["a" * 100, "b"] * 5000)
    tokenizer = tokenizer_of("byte-level", TEMPLATES["chatml"])
    with pytest.raises(BadInput, match="5,000 answers in 505,000 characters"):
        list(Encoder(tokenizer).samples([row]))
