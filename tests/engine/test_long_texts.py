"""Long texts become the tokens of the whole, in calls of bounded size, or are refused by size."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from fluxtrain.data.encoding import long_texts
from fluxtrain.data.encoding.borders import encode_with_places
from fluxtrain.data.encoding.encode import Encoder
from fluxtrain.data.encoding.long_texts import common_lengths, encode_bounded, pieces, too_long
from fluxtrain.data.encoding.tokenizer import TokenKinds
from fluxtrain.data.row import Origin, Row
from fluxtrain.errors import BadInput
from tests.conftest import MANY
from tests.engine import mask_grounds
from tests.engine.conftest import SENTENCES
from tests.engine.mask_grounds import TEMPLATES, tokenizer_of

WORDS = [
    *SENTENCES[:3], "  indented\n\tcode()\n\n\n", "漢字が好き。毎日書く。", "x" * 30, "1234567 89",
    " <|im_end|> ", "naïve café", "\n\n", "a  b   c",
]  # fmt: skip


def bpe(**options: Any) -> Tokenizer:
    return Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=False, **options))


def trained(tokenizer: Tokenizer, trainer: Any) -> Callable[[Sequence[str]], list[list[int]]]:
    tokenizer.train_from_iterator([*WORDS, *SENTENCES] * 3, trainer)
    tokenizer.add_special_tokens(["<|im_end|>"])
    return lambda texts: [
        one.ids for one in tokenizer.encode_batch(list(texts), add_special_tokens=False)
    ]


def byte_level() -> Callable[[Sequence[str]], list[list[int]]]:
    """As of GPT-2 and Llama 3: words with the space before them."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    return trained(made, trainers.BpeTrainer(vocab_size=500, initial_alphabet=alphabet))


def sentencepiece() -> Callable[[Sequence[str]], list[list[int]]]:
    """As of Llama 2: one word for the whole text, with a mark in front of it."""
    made = bpe()
    made.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=["<unk>"])
    made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
    encode = trained(made, trainer)
    made.pre_tokenizer = pre_tokenizers.Sequence([])
    return encode


def unigram() -> Callable[[Sequence[str]], list[list[int]]]:
    """As of T5 and Gemma."""
    made = Tokenizer(models.Unigram())
    made.normalizer = normalizers.NFKC()
    made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    made.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(vocab_size=300, special_tokens=["<unk>"], unk_token="<unk>")
    return trained(made, trainer)


def word_piece() -> Callable[[Sequence[str]], list[list[int]]]:
    """As of BERT, which drops white space."""
    made = Tokenizer(models.WordPiece(unk_token="<unk>"))
    made.normalizer = normalizers.BertNormalizer()
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    return trained(made, trainers.WordPieceTrainer(vocab_size=400, special_tokens=["<unk>"]))


KINDS = {one.__name__: one for one in (byte_level, sentencepiece, unigram, word_piece)}
ACROSS = ("prepending", "sentencepiece")  # their tokens may reach across words: none, or refused
TRAINED: dict[str, Callable[[Sequence[str]], list[list[int]]]] = {}


def encoding(kind: str) -> Callable[[Sequence[str]], list[list[int]]]:
    if kind not in TRAINED and kind in KINDS:
        TRAINED[kind] = KINDS[kind]()
    elif kind not in TRAINED:
        TRAINED[kind] = TokenKinds(tokenizer_of(kind, None)).encode_at_once
    return TRAINED[kind]


@pytest.fixture(autouse=True, scope="module")
def _small_pieces() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(long_texts, "PIECE_CHARACTERS", 120)
        patch.setattr(long_texts, "AT_ONCE_CHARACTERS", 300)
        patch.setattr(long_texts, "MOST_CHARACTERS", 600)
        patch.setattr(long_texts, "_CONTEXT", 48)
        yield


@pytest.mark.parametrize("kind", [*KINDS, *mask_grounds.KINDS])
@given(parts=st.lists(st.sampled_from(WORDS), min_size=1, max_size=60), places=st.data())
@settings(max_examples=MANY)
def test_the_tokens_of_pieces_are_those_of_the_whole(
    kind: str, parts: list[str], places: st.DataObject
) -> None:
    encode, text = encoding(kind), " ".join(parts)
    calls: list[int] = []

    def counted(texts: Sequence[str]) -> list[list[int]]:
        calls.append(sum(map(len, texts)))
        return encode(texts)

    [whole] = encode([text])
    try:
        assert encode_bounded([text], counted) == [whole]
    except BadInput:
        assert kind in ACROSS
        return
    assert max(calls, default=0) <= 600 + 300
    if kind in ACROSS:
        return
    cuts = sorted(places.draw(st.lists(st.integers(0, len(text)), max_size=5)))
    expected = [
        next((i for i, (a, b) in enumerate(zip(ids, whole, strict=False)) if a != b), len(ids))
        for ids in encode([text[:cut] for cut in cuts])
    ]
    found = common_lengths(text, cuts, whole, encode)
    assert [same for same, _ in found] == [min(one, len(whole)) for one in expected]


def test_many_texts_go_to_the_tokenizer_in_groups_and_keep_their_order() -> None:
    encode, texts = encoding("byte_level"), [" ".join(WORDS[:n]) for n in range(1, 9)] * 3
    calls: list[int] = []

    def counted(some: Sequence[str]) -> list[list[int]]:
        calls.append(sum(map(len, some)))
        return encode(some)

    assert encode_bounded(texts, counted) == encode(texts)
    assert max(calls) <= 600 and len(calls) > 3
    assert encode_bounded([], counted) == [] and encode_bounded([""], counted) == [[]]


@pytest.mark.parametrize("kind", KINDS)
def test_a_text_without_a_place_is_refused_by_size(kind: str) -> None:
    solid = "the end " * 40 + "x" * 1300 + " and on" * 40
    assert "600 characters without white space behind its character" in too_long(solid)
    with pytest.raises(BadInput, match="no place behind its character"):
        list(pieces(solid, encoding(kind)))
    assert too_long("the end " * 400) == ""


def test_a_row_is_too_long_as_a_whole_or_with_its_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(long_texts, "LARGEST_CHARACTERS", 5000)
    assert "has 5,001 characters, and at most 5,000" in too_long("a " * 2500 + "a")
    assert too_long("a " * 2500) == ""


# --- conversations --------------------------------------------------------------------------------


def talk(*said: str) -> Row:
    roles = ["user", "assistant"] * len(said)
    messages: Any = tuple(
        {"role": role, "content": words} for role, words in zip(roles, said, strict=False)
    )
    weights = tuple(float(one["role"] == "assistant") for one in messages)
    return Row(origin=Origin("x.jsonl", 1), messages=messages, weights=weights)


@pytest.mark.parametrize("kind", [one for one in mask_grounds.KINDS if one != "prepending"])
def test_a_long_conversation_gives_the_sample_of_the_whole(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = talk(" ".join(SENTENCES * 2), "yes. " * 300, "漢字。" * 90, " ".join(WORDS[:5] * 20))
    made = []
    for size in (120, 1 << 30):
        monkeypatch.setattr(long_texts, "PIECE_CHARACTERS", size)
        monkeypatch.setattr(long_texts, "AT_ONCE_CHARACTERS", size)
        monkeypatch.setattr(long_texts, "MOST_CHARACTERS", 5 * size)
        tokenizer = tokenizer_of(kind, TEMPLATES["chatml"])
        [(sample, _)] = list(Encoder(tokenizer).samples([row]))
        assert sample.marks is not None
        made.append((sample.ids.tolist(), sample.marks.tolist()))
    assert made[0] == made[1] and any(made[0][1])


def test_a_conversation_beyond_the_limit_is_a_bad_row_with_the_cure(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(long_texts, "LARGEST_CHARACTERS", 500)
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


def test_places_in_long_texts_are_those_of_short_ones() -> None:
    kinds = TokenKinds(tokenizer_of("byte-level", None))
    text = " ".join(SENTENCES[:9])
    places = [3, 50, 51, 200, len(text)]
    [found] = encode_with_places([(text, places)], kinds)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(long_texts, "PIECE_CHARACTERS", 1 << 30)
        [expected] = encode_with_places([(text, places)], kinds)
    assert found == expected
