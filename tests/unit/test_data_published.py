"""Rows as well-known data sets have them: read in the right shape, or refused with the cure."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fluxtrain.errors import BadInput
from tests.unit.data_files import corpus, lines, reported

TURNS = [{"role": "user", "content": "how"}, {"role": "assistant", "content": "so"}]
RENDERED = "Below is an instruction.\n\n### Instruction:\nhow\n\n### Response:\nso"

READ: dict[str, tuple[dict[str, Any], str, set[str]]] = {
    "alpaca": (
        {"instruction": "how", "input": "", "output": "so", "text": RENDERED}, "alpaca", {"text"}),
    "ultrachat": (
        {"prompt": "how", "prompt_id": "a1", "messages": TURNS}, "messages",
        {"prompt", "prompt_id"}),
    "slimorca": (
        {"conversations": [
            {"from": "system", "value": "be brief", "weight": None},
            {"from": "human", "value": "how", "weight": 0},
            {"from": "gpt", "value": "so", "weight": 1}]}, "sharegpt", set()),
    "magpie": (
        {"uuid": "1", "instruction": "how", "response": "so", "difficulty": "easy",
         "conversations": [{"from": "human", "value": "how"}, {"from": "gpt", "value": "so"}]},
        "sharegpt", {"uuid", "instruction", "response", "difficulty"}),
    "hermes tools": (
        {"id": "1", "tools": '[{"type": "function", "function": {"name": "f"}}]',
         "conversations": [{"from": "human", "value": "how"}, {"from": "gpt", "value": "so"}],
         "category": "c"}, "sharegpt", {"id", "category"}),
    "wikipedia": ({"id": "1", "url": "u", "title": "Mill", "text": "x"}, "text", {"id", "url"}),
    "fineweb": (
        {"text": "x", "id": "1", "dump": "d", "url": "u", "language_score": 0.9, "token_count": 3},
        "text", {"id", "dump", "url", "language_score", "token_count"}),
    "the pile": ({"text": "x", "meta": {"pile_set_name": "p"}}, "text", {"meta"}),
    "capybara": (
        {"source": "s", "conversation": [{"input": "how", "output": "so"}]}, "messages",
        {"source"}),
    "lima": ({"conversations": ["how", "so"], "source": "s"}, "messages", {"source"}),
    "wildchat": ({"conversation": TURNS, "turn": 1, "turns": 1}, "messages", {"turn", "turns"}),
    "belle": ({"conversations": [["how", "so"]], "id": 3}, "messages", {"id"}),
    "sequence of the datasets library": (
        {"conversations": {"from": ["human", "gpt"], "value": ["how", "so"]}}, "sharegpt", set()),
    "openai": ({"messages": TURNS, "parallel_tool_calls": False}, "messages",
               {"parallel_tool_calls"}),
}  # fmt: skip

READ |= {
    "dolly": ({"instruction": "how", "context": "", "response": "so", "category": "c"},
              "alpaca", {"category"}),
    "gsm8k": ({"question": "how", "answer": "so"}, "completion", set()),
    "orca": ({"system_prompt": "s", "question": "how", "response": "so"}, "alpaca", set()),
    "flan": ({"inputs": "how", "targets": "so"}, "completion", set()),
}  # fmt: skip

REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "imdb": ({"text": "a film", "label": 1}, "has the key `label`"),
    "hh-rlhf": ({"chosen": "a", "rejected": "b"}, "is a preference row (chosen, rejected)"),
    "ultrafeedback": (
        {"prompt": "how", "chosen": TURNS, "rejected": TURNS, "messages": TURNS},
        "is a preference row"),
    "oasst": ({"message_id": "1", "text": "how", "role": "prompter", "labels": {"spam": 0.1}},
              "has the key `labels`"),
    "smoltalk2": ({"messages": TURNS, "chat_template_kwargs": {"enable_thinking": False}},
                  "has the key `chat_template_kwargs`"),
    "kto": ({"conversations": [{"from": "human", "value": "how"}, {"from": "gpt", "value": "so"}],
             "kto_tag": False}, "is a preference row (kto_tag)"),
    "squad": ({"id": "1", "title": "t", "context": "c", "question": "q", "answers": {"text": []}},
              "has no key that names its text"),
}  # fmt: skip


@pytest.mark.parametrize("name", READ)
def test_a_published_row_is_read_and_what_it_has_besides_is_counted(
    tmp_path: Path, name: str
) -> None:
    record, shape, ignored = READ[name]
    path = lines(tmp_path, record)
    assert corpus(path).parts[0].shape == shape
    [row], report = reported(path)
    assert set(report.ignored) == ignored
    assert row.text or row.messages[-1]["content"] == "so"
    assert "x" in row.text or row.weights[-1] == 1.0


@pytest.mark.parametrize("name", REFUSED)
def test_a_published_row_that_is_not_sure_is_refused(tmp_path: Path, name: str) -> None:
    record, expected = REFUSED[name]
    with pytest.raises(BadInput) as refused:
        reported(lines(tmp_path, record))
    assert expected in str(refused.value)
