"""What a template writes of an answer: its own turn, the same words on every day, or a refusal."""

from __future__ import annotations

from datetime import datetime
from typing import Any

import pytest

from fluxtrain.data.encoding.encode import Encoder
from fluxtrain.data.encoding.notes import Notes
from fluxtrain.data.rendering.chat_template import DATE
from fluxtrain.data.row import Message, Origin, Row, weights_of
from fluxtrain.errors import BadInput
from tests.engine.mask_grounds import TEMPLATES, tokenizer_of

ASKED: Message = {"role": "user", "content": "question"}
SAID: Message = {"role": "assistant", "content": "mill"}
REWRITES = (  # keeps the thoughts of the last turn alone, and marks the words of each
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}"
    "{% if m['role'] == 'assistant' %}{% generation %}"
    "{{ m['content'] if loop.last else m['content'].split('</think>')[-1] }}{{ '<|im_end|>' }}"
    "{% endgeneration %}{% else %}{{ m['content'] + '<|im_end|>' }}{% endif %}{{ '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def encoded(template: str, *messages: Message, **fields: Any) -> tuple[list[str], list[str], Notes]:
    """Return the texts of the samples, what of each is trained on, and the notes."""
    tokenizer = tokenizer_of("byte-level", template)
    row = Row(origin=Origin("a", 1), messages=messages, weights=weights_of(messages), **fields)
    encoder = Encoder(tokenizer)
    found = [sample for sample, _ in encoder.samples([row])]
    return (
        [tokenizer.decode(sample.ids.tolist()) for sample in found],
        [tokenizer.decode(sample.ids[sample.marks].tolist()) for sample in found],
        encoder.notes,
    )


def test_a_marked_answer_is_trained_as_its_own_turn_writes_it() -> None:
    first = {**SAID, "content": "<think>one</think>mill"}
    last = {**SAID, "content": "<think>two</think>river"}
    texts, trained, notes = encoded(REWRITES, ASKED, first, ASKED, last)
    assert trained == ["<think>two</think>river<|im_end|>", "<think>one</think>mill<|im_end|>"]
    assert "one" not in texts[0] and "river" not in texts[1]
    assert not notes.left_out
    texts, trained, _ = encoded(REWRITES, ASKED, SAID, ASKED, last)  # nothing is rewritten
    assert trained == ["mill<|im_end|><think>two</think>river<|im_end|>"] and len(texts) == 1


@pytest.mark.parametrize("tagged", [False, True])
def test_a_template_with_todays_date_writes_the_same_on_every_day(
    tagged: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    dated = "{{ strftime_now('%Y-%m-%d') + '\n' }}" + TEMPLATES["tagged" if tagged else "chatml"]
    [text], _, notes = encoded(dated, ASKED, SAID)
    assert text.startswith(f"{DATE:%Y-%m-%d}\n")
    assert f"{datetime.now():%Y-%m-%d}" not in text
    [said] = notes.sentences()
    assert "1 conversations have 26 July 2024 in its place" in said
    assert Notes.from_json(notes.as_json()) == notes
    _, _, notes = encoded(TEMPLATES["chatml"], ASKED, SAID)
    assert notes.sentences() == []


@pytest.mark.parametrize(
    "content",
    [
        "{% for p in m['content'] %}{{ p['text'] }}{% endfor %}",  # wants a list of parts
        "{{ m['content'] if m['role'] == 'user' else '' }}",
        "{{ m['content'] | upper }}",
    ],
)
def test_an_answer_whose_words_are_not_written_is_refused(content: str) -> None:
    turn = "{{ '<|im_start|>' + m['role'] + '\n' }}" + content + "{{ '<|im_end|>\n' }}"
    template = "{% for m in messages %}" + turn + "{% endfor %}"
    with pytest.raises(BadInput, match="line 1: the chat template leaves out an answer that would"):
        encoded(template, ASKED, SAID)


def test_a_call_that_is_not_written_is_refused() -> None:
    call = {"type": "function", "function": {"name": "weather", "arguments": {}}}
    silent = TEMPLATES["chatml"].replace("m['content']", "(m['content'] or '')")
    answer = {"role": "assistant", "content": None, "tool_calls": [call]}
    with pytest.raises(
        BadInput, match="leaves out a tool call that would be trained on: set data.chat"
    ):
        encoded(silent, ASKED, answer)


def test_special_tokens_in_the_words_of_a_row_are_told() -> None:
    asked = {**ASKED, "content": "what is <|im_end|> and <b>?"}
    said = {**SAID, "content": "an end <|im_end|><|im_start|>user"}
    _, trained, notes = encoded(TEMPLATES["chatml"], asked, said)
    assert trained[0].endswith("<|im_end|>")
    assert {name: noted.rows for name, noted in notes.within.items()} == {
        "<|im_end|>": 1, "<|im_start|>": 1,
    }  # fmt: skip
    told = notes.sentences()
    assert "1 row holds <|im_end|> in the words" in told[0] and "a line 1" in told[0]
    assert Notes.from_json(notes.as_json()) == notes
    _, _, notes = encoded(TEMPLATES["chatml"], ASKED, SAID)
    assert not notes.within
