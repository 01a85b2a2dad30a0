"""Prompts that are not UTF-8 are refused as what they are, wherever they come from; a chat and a
program's asks go on behind them."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from fluxtrain.cli import main
from fluxtrain.errors import BadInput
from fluxtrain.events.answers.generation import Answered, Ask, Event, Refused, encoded
from fluxtrain.models.generate.prompts import Prompting, UserPrompt, read_prompts
from fluxtrain.models.generate.sampling import Sampling
from fluxtrain.results.generation_session import GenerationSession
from fluxtrain.results.serving import Stopping, serve
from tests.engine.used_models import opened

Folder = Callable[..., Path]
LATIN = "h\xe9llo".encode("latin-1")
TOLD = "is not UTF-8 (it has the byte 0xE9): convert it, as with `iconv -f latin1 -t utf-8`"


@pytest.mark.parametrize("errors", ["strict", "surrogateescape"])
def test_a_line_of_a_chat_that_is_not_utf8_is_refused_and_the_next_is_answered(
    errors: str,
    model_folder: Folder,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    typed = io.BytesIO(LATIN + b"\nthe fox\n")
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(typed, encoding="utf-8", errors=errors))
    few = ["--max-new-tokens", "2", "--device", "cpu"]
    with pytest.raises(SystemExit) as caught:
        main(["generate", str(model_folder("llama")), *few])
    assert caught.value.code == 0
    told = capsys.readouterr().err
    assert f"the prompt {TOLD}" in told and "tokenizer" not in told
    assert told.count("[2 tokens in") == 1


def test_an_ask_that_is_not_utf8_is_refused_and_the_next_is_answered(model_folder: Folder) -> None:
    line = encoded(Ask(id="a", prompt="fox")).replace(b"fox", LATIN)
    events: list[Event] = []
    with opened(model_folder("llama")) as model:
        session = GenerationSession.of(
            model, Prompting(model), Sampling(max_new_tokens=2, temperature=0)
        )
        serve(session, [line, encoded(Ask(id="b", prompt="fox"))], events.extend, Stopping())
    (refused,) = (one for one in events if isinstance(one, Refused))
    assert refused.message == "a line of the input is no request: it is not UTF-8"
    assert [one.id for one in events if isinstance(one, Answered)] == ["b"]


@pytest.mark.parametrize(
    ("name", "content", "told"),
    [
        ("a.txt", b"fox\n" + LATIN + b"\n", f"line 2 {TOLD}"),
        ("a.jsonl", b'"fox"\n"' + LATIN + b'"\n', f"line 2 {TOLD}"),
        ("a.jsonl", rb'"a \ud800"', r"line 1 has \ud800, half of a surrogate pair"),
        ("a.jsonl", rb'{"messages": [{"role": "user", "content": "\udce9"}]}', f"line 1 {TOLD}"),
    ],
)
def test_a_file_of_prompts_is_refused_by_the_line_that_is_no_text(
    name: str, content: bytes, told: str, tmp_path: Path
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(BadInput) as caught:
        read_prompts(tmp_path / name)
    assert f"{tmp_path / name} {told}" in str(caught.value)


def test_a_system_message_that_is_not_utf8_is_named(model_folder: Folder) -> None:
    with opened(model_folder("llama")) as model, pytest.raises(BadInput) as caught:
        Prompting(model, system=os.fsdecode(LATIN))
    assert str(caught.value) == f"--system {TOLD}"


def test_a_pair_in_json_is_a_character() -> None:
    UserPrompt(text="\U0001f600 \xe9").check()
