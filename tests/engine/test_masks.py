"""What is trained on is the assistant's words and their ends, for all tokenizers and templates."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerBase

from fluxtrain.data.encoding.encode import Encoder
from fluxtrain.data.encoding.notes import Notes
from fluxtrain.data.encoding.samples import Sample
from fluxtrain.data.row import Message, Origin, Row, weights_of
from fluxtrain.errors import BadInput
from tests.engine.mask_grounds import KINDS, TEMPLATES, tokenizer_of

PIECES = [
    "the river", "  ", "\n", "\n\n", "    total", " ", "mill", "def area(w):", "0 1", "return", ".",
    "?", " brothers ", "\n    ",
]  # fmt: skip
WRITTEN = st.lists(st.sampled_from(PIECES), min_size=1, max_size=6).map("".join)
FILLED = WRITTEN.filter(lambda text: bool(text.strip()))
TOKENIZERS = {pair: tokenizer_of(pair[0], TEMPLATES[pair[1]])
              for pair in itertools.product(KINDS, TEMPLATES)}  # fmt: skip


@st.composite
def conversations(draw: st.DrawFn) -> tuple[Message, ...]:
    """Questions and answers, some opened by the assistant, some with an answer twice."""
    turns = draw(st.lists(st.tuples(FILLED, FILLED), min_size=1, max_size=4))
    messages: list[Message] = []
    for asked, answered in turns:
        messages += [{"role": "user", "content": asked}, {"role": "assistant", "content": answered}]
    if draw(st.integers(0, 4)) == 0:
        messages = messages[1:]
    if draw(st.integers(0, 4)) == 0 and len(messages) > 1:
        messages.append({"role": "user", "content": draw(FILLED)})
    return tuple(messages)


def row_of(messages: tuple[Message, ...], **fields: object) -> Row:
    values: dict[str, object] = {"weights": weights_of(messages)} | fields
    return Row(origin=Origin("talk.jsonl", 3), messages=messages, **values)  # type: ignore[arg-type]


def encoded(row: Row, tokenizer: PreTrainedTokenizerBase) -> tuple[list[Sample], Notes]:
    encoder = Encoder(tokenizer)
    return [sample for sample, _ in encoder.samples([row])], encoder.notes


def trained(sample: Sample, tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Decode the stretches that are trained on, each behind the text before it."""
    assert sample.marks is not None
    ids, marks = sample.ids.tolist(), sample.marks.tolist()
    found: list[str] = []
    borders = [0, *(i for i in range(1, len(ids)) if marks[i] != marks[i - 1]), len(ids)]
    for first, last in itertools.pairwise(borders):
        if marks[first]:
            before = tokenizer.decode(ids[:first], clean_up_tokenization_spaces=False)
            whole = tokenizer.decode(ids[:last], clean_up_tokenization_spaces=False)
            found.append(whole[len(before) :])
    return found


def dense(text: str) -> str:
    return "".join(text.split())


def ending(name: str) -> str:
    return "</s>" if name in ("trimmed, eos", "no ends") else "<|im_end|>"


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=12)
@given(messages=conversations())
def test_the_answers_and_their_ends_are_trained_and_nothing_else(
    kind: str, name: str, messages: tuple[Message, ...]
) -> None:
    tokenizer = TOKENIZERS[kind, name]
    samples, notes = encoded(row_of(messages), tokenizer)
    told = [part for sample in reversed(samples) for part in trained(sample, tokenizer)]
    answers = [m["content"] for m in messages if m["role"] == "assistant"]
    prefix = "<think></think>" if name.startswith("thoughts") else ""
    if name == "opened with a thought":
        prefix = ""
    assert [dense(part) for part in told] == [
        prefix + dense(answer) + ending(name) for answer in answers
    ]
    if kind in ("byte-level", "trimming", "adds-bos") and not name.startswith("trimmed"):
        for part, answer in zip(told, answers, strict=True):  # white space is the assistant's too
            assert part.endswith(answer + ("\n" if name == "no ends" else "") + ending(name))
    assert sum(notes.ends.values()) == len(answers)
    assert not notes.left_out


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=30)
@given(messages=conversations())
def test_the_tokens_are_those_of_the_rendering_unless_a_merge_crosses_the_prompt(
    kind: str, messages: tuple[Message, ...]
) -> None:
    tokenizer = TOKENIZERS[kind, "chatml"]
    [sample], _ = encoded(row_of(messages), tokenizer)
    whole = tokenizer.apply_chat_template(list(messages), return_dict=False)
    ids = sample.ids.tolist()
    if ids != whole:
        assert any(m["content"][0].isspace() for m in messages if m["role"] == "assistant")
        for index, message in enumerate(messages):  # it goes on from what inference would see
            if message["role"] == "assistant" and index and message["content"][0].isspace():
                prompt = tokenizer.apply_chat_template(
                    list(messages[:index]), add_generation_prompt=True, return_dict=False
                )
                assert ids[: len(prompt)] == prompt
                break
    decoded = [tokenizer.decode(one, clean_up_tokenization_spaces=False) for one in (ids, whole)]
    assert decoded[0] == decoded[1]


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=15)
@given(prompt=WRITTEN, completion=FILLED, held=st.booleans())
def test_a_completion_without_a_template_is_trained_with_an_end(
    kind: str, prompt: str, completion: str, held: bool
) -> None:
    tokenizer = tokenizer_of(kind, None)
    messages: tuple[Message, ...] = (
        {"role": "user", "content": ("<s>" if held else "") + prompt},
        {"role": "assistant", "content": completion + ("</s>" if held else "")},
    )
    [sample], notes = encoded(row_of(messages, plain=True), tokenizer)
    [part] = trained(sample, tokenizer)
    assert dense(part) == dense(completion) + "</s>"
    assert sample.ids.tolist().count(tokenizer.eos_token_id) == 1
    begins = held + (kind == "adds-bos" and not held)
    assert sample.ids.tolist().count(tokenizer.bos_token_id) == begins
    assert notes.doubled == held


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("begin", ["", "<s>"])
@pytest.mark.parametrize("end", ["", "</s>", "</s>\n"])
def test_a_text_has_its_special_tokens_once(kind: str, begin: str, end: str) -> None:
    tokenizer = tokenizer_of(kind, None)
    encoder = Encoder(tokenizer)
    rows = [
        Row(origin=Origin("a", 1), text=f"{begin}the river{end}"),
        Row(origin=Origin("a", 2), text=f"{begin}the mill", ends=False),
        Row(origin=Origin("a", 2), text=f" runs{end}", begins=False),
    ]
    one, first, rest = (sample.ids.tolist() for sample, _ in encoder.samples(rows))
    begins = int(bool(begin) or kind == "adds-bos")
    for ids in (one, first + rest):
        assert ids.count(tokenizer.bos_token_id) == begins
        assert ids.count(tokenizer.eos_token_id) == 1
        assert begins == 0 or ids[0] == tokenizer.bos_token_id
    assert tokenizer.eos_token_id not in first and tokenizer.bos_token_id not in rest


@pytest.mark.parametrize("name", ["chatml", "tagged", "thoughts of the last turn"])
def test_a_message_with_the_weight_0_is_seen_and_not_trained_on(name: str) -> None:
    tokenizer = TOKENIZERS["byte-level", name]
    said = {"question": "user", "mill": "assistant", "?": "user", "river": "assistant"}
    talk = tuple({"role": role, "content": words} for words, role in said.items())
    samples, _ = encoded(row_of(talk, weights=(0.0, 0.0, 0.0, 1.0)), tokenizer)
    told = [dense(part) for sample in samples for part in trained(sample, tokenizer)]
    assert [part.removeprefix("<think></think>") for part in told] == ["river<|im_end|>"]
    assert "mill" in tokenizer.decode(samples[0].ids)
    with pytest.raises(BadInput, match=r"talk.jsonl line 3: message 4 has the weight 0.5"):
        encoded(row_of(talk, weights=(0.0, 1.0, 0.0, 0.5)), tokenizer)
    with pytest.raises(BadInput, match="its answers have the weight 0"):
        encoded(row_of(talk, weights=(0.0, 0.0, 0.0, 0.0)), tokenizer)


def test_a_template_without_ends_and_a_tokenizer_without_one_are_refused() -> None:
    tokenizer = tokenizer_of("byte-level", TEMPLATES["no ends"], eos=None)
    talk = ({"role": "user", "content": "a"}, {"role": "assistant", "content": "b"})
    with pytest.raises(BadInput, match=r"never learn to stop: set eos_token"):
        encoded(row_of(talk), tokenizer)
    _, notes = encoded(row_of(talk), tokenizer_of("byte-level", TEMPLATES["no ends"]))
    [told] = notes.sentences()
    assert "no end behind an answer" in told and "data.chat_template" in told
    assert Notes.from_json(notes.as_json()) == notes
