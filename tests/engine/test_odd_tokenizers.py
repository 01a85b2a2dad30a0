"""Tokenizers without a fast version and without a padding token: the same rows and masks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import PreTrainedTokenizer

from fluxtrain.data.encoding.encode import Encoder
from fluxtrain.data.prepare import DataSource, ModelLimits, prepare
from fluxtrain.data.reading.request import read_request
from fluxtrain.data.row import Origin, Row, weights_of
from fluxtrain.models.loading import pad_id
from tests.engine.mask_grounds import TEMPLATES, tokenizer_of

LETTERS = [chr(code) for code in (10, *range(32, 127))]
TALK: tuple[dict[str, Any], ...] = (
    {"role": "user", "content": "what is two?"},
    {"role": "assistant", "content": "  it is\n    four"},
    {"role": "user", "content": "and three?"},
    {"role": "assistant", "content": "six"},
)


class Letters(PreTrainedTokenizer):
    """A tokenizer in Python alone: a token a letter."""

    vocab_files_names: dict[str, str] = {}  # noqa: RUF012

    def __init__(self, **options: Any) -> None:
        self._numbers = {letter: at for at, letter in enumerate(["<unk>", *LETTERS])}
        super().__init__(unk_token="<unk>", **options)

    @property
    def vocab_size(self) -> int:
        return len(self._numbers)

    def get_vocab(self) -> dict[str, int]:
        return self._numbers | self.added_tokens_encoder

    def _tokenize(self, text: str, **_: Any) -> list[str]:
        return list(text)

    def _convert_token_to_id(self, token: str) -> int:
        return self._numbers.get(token, 0)

    def _convert_id_to_token(self, index: int) -> str:
        return ["<unk>", *LETTERS][index]

    def convert_tokens_to_string(self, tokens: list[str]) -> str:
        return "".join(tokens)

    def save_vocabulary(self, *_: Any, **__: Any) -> tuple[str, ...]:
        return ()


def letters(template: str | None = None) -> Letters:
    made = Letters(
        eos_token="</s>", bos_token="<s>",
        additional_special_tokens=["<|im_start|>", "<|im_end|>"],
    )  # fmt: skip
    made.chat_template = template
    return made


def trained(sample: Any, tokenizer: Any) -> list[str]:
    marks, found = [*sample.marks.tolist(), False], []
    first = 0
    for at in range(1, len(marks)):
        if marks[at] != marks[at - 1]:
            if marks[at - 1]:
                found.append(tokenizer.decode(sample.ids[first:at].tolist()))
            first = at
    return found


@pytest.mark.parametrize("name", ["chatml", "tagged", "thoughts of the last turn"])
def test_a_tokenizer_without_a_fast_version_learns_the_answers_and_their_ends(name: str) -> None:
    tokenizer = letters(TEMPLATES[name])
    assert not tokenizer.is_fast
    row = Row(origin=Origin("a", 1), messages=TALK, weights=weights_of(TALK))
    samples = [sample for sample, _ in Encoder(tokenizer).samples([row])]
    told = [part for sample in reversed(samples) for part in trained(sample, tokenizer)]
    thought = "<think>\n\n</think>\n\n" if name.startswith("thoughts") else ""
    assert told == [f"{thought}  it is\n    four<|im_end|>", f"{thought}six<|im_end|>"]


def test_a_tokenizer_without_a_fast_version_ends_texts_and_completions_once() -> None:
    tokenizer = letters()
    plain = (TALK[0], {"role": "assistant", "content": " four"})
    rows = [
        Row(origin=Origin("a", 1), text="the mill"),
        Row(origin=Origin("a", 2), messages=plain, weights=weights_of(plain), plain=True),
    ]
    text, completion = (sample for sample, _ in Encoder(tokenizer).samples(rows))
    assert tokenizer.decode(text.ids.tolist()) == "the mill</s>"
    assert trained(completion, tokenizer) == [" four</s>"]


def test_its_tokens_are_cached_by_its_vocabulary(tmp_path: Path) -> None:
    data = tmp_path / "texts.jsonl"
    data.write_text("".join(json.dumps({"text": f"the mill {i}"}) + "\n" for i in range(50)))
    source = DataSource(
        request=read_request({"path": str(data)}), sequence_length=32, held_out=0.1,
        token_cache=str(tmp_path / "cache"),
    )  # fmt: skip
    limits = ModelLimits(embedding_rows=200)
    made, again = (prepare(source, letters(), limits) for _ in range(2))
    assert made.trained.fingerprint() == again.trained.fingerprint()
    assert len(list((tmp_path / "cache").iterdir())) == 1
    prepare(source, letters("{{ messages }}"), limits)
    assert len(list((tmp_path / "cache").iterdir())) == 2


def test_without_a_padding_token_padding_is_never_seen_or_trained_on(tmp_path: Path) -> None:
    tokenizer = tokenizer_of("byte-level", TEMPLATES["chatml"])
    assert tokenizer.pad_token_id is None
    data = tmp_path / "talks.jsonl"
    talks = [{"messages": [{**TALK[0], "content": f"{'why ' * i}?"}, TALK[3]]} for i in range(9)]
    data.write_text("".join(json.dumps(talk) + "\n" for talk in talks))
    request = read_request({"path": str(data)})
    for packs in (True, False):
        limits = ModelLimits(embedding_rows=600, pad_id=pad_id(tokenizer), packs=packs)
        source = DataSource(request=request, sequence_length=48, held_out=0.0)
        rows = prepare(source, tokenizer, limits).trained
        whole = rows.take(np.arange(len(rows)))
        padding = whole.document_ids < 0
        assert padding.any()
        assert (whole.input_ids[padding] == pad_id(tokenizer)).all()
        assert (whole.labels[padding] == -100).all()
        ends = whole.labels == tokenizer.convert_tokens_to_ids("<|im_end|>")
        assert int(ends.sum()) == len(talks)  # an end is trained on, though padding looks like one
