"""Templates of many families, as published: answers, calls and their ends are trained on, once."""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from fluxtrain.data.encoding.conversations import OPENING
from fluxtrain.data.encoding.encode import Encoder
from fluxtrain.data.row import Message, Origin, Row, Tool, weights_of
from fluxtrain.errors import BadInput
from tests.engine.test_odd_tokenizers import Letters, trained

_TRL = find_spec("trl")
FOLDER = Path(_TRL.origin).parent / "chat_templates" if _TRL and _TRL.origin else Path("/none")
pytestmark = pytest.mark.skipif(not FOLDER.is_dir(), reason="needs trl's chat templates")

SPECIALS = re.compile(r"<[|｜][^<>|｜]{1,40}[|｜]>|<(?:start|end)_of_turn>|<turn\|>|</?s>")
CALL = {"type": "function", "id": "abcdefghi",
        "function": {"name": "weather_of", "arguments": {"city": "Oslo"}}}  # fmt: skip
TOOLS: tuple[Tool, ...] = (
    {"type": "function", "function": {"name": "weather_of", "description": "tells the weather",
     "parameters": {"type": "object", "properties": {"city": {"type": "string",
                                                              "description": "of"}}}}},
)  # fmt: skip
ASKED: tuple[Message, ...] = (
    {"role": "user", "content": "first question"},
    {"role": "assistant", "content": "first answer"},
    {"role": "user", "content": "second question"},
    {"role": "assistant", "content": "second answer"},
)
CALLED: tuple[Message, ...] = (
    {"role": "user", "content": "how is Rome?"},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "content": "sunshine", "tool_call_id": "abcdefghi", "name": "weather_of"},
    {"role": "assistant", "content": "it rains"},
)
FAMILIES = {  # and what ends a plain answer
    "qwen2_5": "<|im_end|>", "qwen3": "<|im_end|>", "qwen3_training": "<|im_end|>",
    "qwen3_5_think": "<|im_end|>", "llama3": "<|eot_id|>", "llama3_1": "<|eot_id|>",
    "llama3_training": "<|eot_id|>", "gemma3": "<end_of_turn>", "gemma4": "<turn|>",
    "phi3": "<|end|>", "phi3_5_training": "<|end|>", "cohere": "<|END_OF_TURN_TOKEN|>",
    "deepseek_r1_distill": "<｜end▁of▁sentence｜>", "gptoss": "<|return|>",
    "lfm2_2_5": "<|im_end|>", "nemotron_3_nano": "<|im_end|>",
}  # fmt: skip
KNOW_TOOLS = ("qwen2_5", "qwen3", "qwen3_training", "qwen3_5_think", "llama3_1", "gptoss",
              "deepseek_r1_distill", "lfm2_2_5", "nemotron_3_nano")  # fmt: skip
KNOW_NONE = ("llama3", "llama3_training", "phi3", "phi3_5_training")


def told(name: str, messages: tuple[Message, ...], tools: tuple[Tool, ...] = ()) -> list[str]:
    """Return what is trained on of a conversation, in the order of its answers."""
    template = (FOLDER / f"{name}.jinja").read_text()
    specials: list[Any] = sorted(set(SPECIALS.findall(template)))
    tokenizer = Letters(eos_token="</s>", bos_token="<s>", additional_special_tokens=specials)
    tokenizer.chat_template = template
    row = Row(origin=Origin("a", 1), messages=messages, weights=weights_of(messages), tools=tools)
    samples = [sample for sample, _ in Encoder(tokenizer).samples([row])]
    parts = [part for sample in samples for part in trained(sample, tokenizer)]
    words = [message["content"] or "weather_of" for message in messages if message["role"] ==
             "assistant"]  # fmt: skip
    return sorted(parts, key=lambda part: next(i for i, said in enumerate(words) if said in part))


@pytest.mark.parametrize("name", FAMILIES)
def test_each_answer_and_its_end_are_trained_once(name: str) -> None:
    first, second = told(name, ASKED)
    assert first.count("first answer") == 1 and second.count("second answer") == 1
    for part in (first, second):
        assert "question" not in part
    assert second.endswith(f"second answer{FAMILIES[name]}")


@pytest.mark.parametrize("name", KNOW_TOOLS)
def test_a_call_and_what_follows_it_are_trained_on(name: str) -> None:
    call, said = told(name, CALLED, TOOLS)
    assert "weather_of" in call and "Oslo" in call and "it rains" in said
    assert not re.search(r"\b(None|null)\b", call + said)
    assert "sunshine" not in call + said and "tells the weather" not in call + said
    if name not in ("gptoss", "deepseek_r1_distill"):  # their calls have ends of their own
        assert call.endswith(FAMILIES[name])


@pytest.mark.parametrize("name", KNOW_NONE)
def test_a_call_that_a_family_cannot_write_is_refused(name: str) -> None:
    with pytest.raises(BadInput, match="leaves out a tool call that would be trained on"):
        told(name, CALLED, TOOLS)


@pytest.mark.parametrize("name", ["qwen3_5_think", "qwen3_6"])
def test_an_opening_answer_that_a_family_refuses_alone_is_seen_and_told(name: str) -> None:
    template = (FOLDER / f"{name}.jinja").read_text()
    specials: list[Any] = sorted(set(SPECIALS.findall(template)))
    tokenizer = Letters(eos_token="</s>", bos_token="<s>", additional_special_tokens=specials)
    tokenizer.chat_template = template
    messages = ({"role": "assistant", "content": "greeting words"}, *ASKED)
    encoder = Encoder(tokenizer)
    row = Row(origin=Origin("a", 1), messages=messages, weights=weights_of(messages))
    samples = [sample for sample, _ in encoder.samples([row])]
    parts = "".join(part for sample in samples for part in trained(sample, tokenizer))
    assert "first answer" in parts and "second answer" in parts and "greeting" not in parts
    assert "greeting words" in tokenizer.decode(samples[0].ids.tolist())
    assert encoder.notes.left_out[OPENING].rows == 1
    with pytest.raises(BadInput, match="refuses this: No user query"):
        told(name, messages[:1])
