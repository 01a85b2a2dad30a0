"""From the command: tools, ends, long samples and templates, each as a whole run says it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fluxtrain.commands import inspection
from fluxtrain.commands.preview import preview
from fluxtrain.config.schema import load_config
from fluxtrain.data.packing import choose_row_length
from fluxtrain.data.rendering.chat_template import ChatTemplate
from fluxtrain.data.rendering.named import NAMED, use_template
from fluxtrain.data.row import Origin, Row
from fluxtrain.errors import BadInput
from fluxtrain.events.answers.answers import InspectionAnswer
from tests.engine.mask_grounds import TEMPLATES, tokenizer_of
from tests.engine.test_masks import encoded, row_of, trained

MakeConfig = Callable[..., Path]
TOOL = {"type": "function", "function": {"name": "weather_of_city", "parameters": {}}}
CALL = {"type": "function", "function": {"name": "weather_of_city", "arguments": {"city": "Oslo"}}}
WITH_TOOLS = (
    "{% if tools %}{{ 'Tools: ' + (tools | tojson) + '<|im_end|>\n' }}{% endif %}"
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}"
    "{% if m['content'] %}{{ m['content'] }}{% endif %}{% for c in m['tool_calls'] or [] %}"
    "{{ c['function']['name'] + ' ' + ARGUMENTS }}{% endfor %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def rows(path: Path, records: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(path)


def talk(question: str, answer: str = "it is four") -> dict[str, Any]:
    said = {"user": question, "assistant": answer}
    return {"messages": [{"role": role, "content": words} for role, words in said.items()]}


def inspected(config: Path) -> InspectionAnswer:
    return inspection.inspect(load_config(config))


@pytest.mark.parametrize(
    ("arguments", "form"),
    [
        ("(c['function']['arguments'] | tojson)", "object"),
        ("c['function']['arguments']", "string"),
        ("(c['function']['arguments'].items() | list | string)", "object"),
    ],
)
def test_a_tool_call_has_the_arguments_that_the_template_expects(arguments: str, form: str) -> None:
    tokenizer = tokenizer_of("byte-level", WITH_TOOLS.replace("ARGUMENTS", arguments))
    assert ChatTemplate(tokenizer).arguments == form
    asked = {"role": "user", "content": "weather?"}
    called = {"role": "assistant", "content": None, "tool_calls": [CALL]}
    [sample], notes = encoded(row_of((asked, called), tools=(TOOL,)), tokenizer)
    [part] = trained(sample, tokenizer)
    assert part.startswith("weather_of_city ") and part.endswith("<|im_end|>") and "Oslo" in part
    if "items" not in arguments:
        assert '{"city": "Oslo"}' in part
    assert "Tools: " in tokenizer.decode(sample.ids)
    assert not notes.left_out


def test_what_a_template_leaves_out_is_counted_and_named_with_the_first_row() -> None:
    template = TEMPLATES["chatml"].replace(
        "{% for m in messages %}", "{% for m in messages if m['role'] != 'system' %}"
    )
    tokenizer = tokenizer_of("byte-level", template)
    messages = (
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "why?", "name": "anna"},
        {"role": "assistant", "content": "so", "reasoning_content": "because of it"},
    )
    _, notes = encoded(row_of(messages, tools=(TOOL,)), tokenizer)
    assert set(notes.left_out) == {
        "a system message", "`name` of a message", "the reasoning of an answer", "`tools`",
    }  # fmt: skip
    assert "leaves out a system message of 1 row (first: talk.jsonl line 3)" in str(
        notes.sentences()
    )


def test_nothing_to_learn_in_any_row_stops_the_run_and_names_the_first(
    run_config: MakeConfig, tmp_path: Path
) -> None:
    data = rows(tmp_path / "empty.jsonl", [talk("two?"), *[talk("three?")] * 3])
    config = run_config(data__path=data, data__max_bad_rows=9)
    folder = tmp_path / "llama-float32"
    for template in folder.glob("chat_template*"):
        template.write_text("{{ raise_exception('never') }}")
    with pytest.raises(BadInput, match=r"none of its 4 rows .*line 1: .*refuses this: never"):
        inspected(config)


def test_the_length_of_rows_is_chosen_from_the_samples(
    run_config: MakeConfig, tmp_path: Path
) -> None:
    words = "the quick brown fox jumps over the lazy dog " * 4
    data = rows(tmp_path / "talks.jsonl", [talk(words)] * 50)
    config = run_config(data__path=data, data__sequence_length="auto")
    found = inspected(config)
    assert found.sequence_length == 128 and max(found.lengths) > 64
    assert "100.0% of 50 samples fit" in found.sequence_length_because
    planned = preview(load_config(config))
    [choice] = [one for one in planned.choices if one.name == "data.sequence_length"]
    assert (choice.value, planned.sequence_length) == ("128", 128)
    assert planned.fitting_share == 1.0


@pytest.mark.parametrize(
    ("lengths", "talks", "positions", "tokens"),
    [
        ([30] * 1000, True, 4096, 64),
        ([30] * 980 + [700] * 20, True, 4096, 1024),
        ([30] * 999 + [9000], True, 40_000, 64),  # one in a thousand is cut
        ([9000] * 10, True, 40_000, 4096),
        ([9000] * 10, False, None, 2048),
        ([9000] * 10, False, 1000, 1000),
        ([100] * 10, False, 512, 64),  # of few texts no step sees all
        ([40], True, 512, 40),
    ],
)
def test_rows_are_as_long_as_the_samples_the_model_and_the_amount_ask_for(
    lengths: list[int], talks: bool, positions: int | None, tokens: int
) -> None:
    found = choose_row_length(np.asarray(lengths), talks=talks, positions=positions)
    assert found.tokens == tokens
    assert "samples fit" in found.because


@pytest.mark.parametrize("name", NAMED)
def test_a_named_template_ends_turns_and_is_refused_without_the_token(name: str) -> None:
    tokenizer = tokenizer_of("byte-level", None)
    end = NAMED[name].end or "</s>"
    if end not in tokenizer.get_vocab():
        with pytest.raises(BadInput, match="no token of this tokenizer.*choose chatml"):
            use_template(tokenizer, name)
        tokenizer.add_special_tokens({"additional_special_tokens": [end]})
    use_template(tokenizer, name)
    said = {"system": "be brief", "user": "why?", "assistant": "the mill"}
    messages = tuple({"role": role, "content": words} for role, words in said.items())
    again = ({"role": "user", "content": "and?"}, {"role": "assistant", "content": "river"})
    [sample], notes = encoded(row_of((*messages, *again)), tokenizer)
    told = [part.strip() for part in trained(sample, tokenizer)]
    assert [part.replace(" </s>", "</s>") for part in told] == [f"the mill{end}", f"river{end}"]
    assert not notes.left_out


def test_a_template_that_is_unknown_or_cannot_be_read_is_refused(tmp_path: Path) -> None:
    tokenizer = tokenizer_of("byte-level", None)
    with pytest.raises(BadInput, match="'chatgpt' is not auto, chatml, "):
        use_template(tokenizer, "chatgpt")
    with pytest.raises(BadInput, match="cannot be read"):
        use_template(tokenizer, str(tmp_path / "none.jinja"))
    (tmp_path / "own.jinja").write_text(TEMPLATES["chatml"])
    use_template(tokenizer, str(tmp_path / "own.jinja"))
    assert tokenizer.chat_template == TEMPLATES["chatml"]


def test_a_text_without_an_end_token_is_told() -> None:
    tokenizer = tokenizer_of("byte-level", None, eos=None)
    _, notes = encoded(Row(origin=Origin("a.txt", 1), text="the river"), tokenizer)
    assert "end of 1 texts is not trained on" in notes.sentences()[0]
