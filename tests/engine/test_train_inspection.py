"""`fluxtrain inspect`: what it shows is what the trainer would learn."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from transformers import AutoTokenizer

from fluxtrain.commands import inspection
from fluxtrain.config.schema import load_config
from fluxtrain.data.packing import IGNORED
from fluxtrain.data.reading import sampling
from fluxtrain.events.answers.answers import InspectedSample, InspectionAnswer
from fluxtrain.events.answers.asking import decoded
from fluxtrain.train.inputs import load_inputs
from tests.engine.runs import text_data

MakeConfig = Callable[..., Path]
TURNS = [
    {"role": "user", "content": "what is two and two?"},
    {"role": "assistant", "content": "it is four"},
    {"role": "user", "content": "and three?"},
    {"role": "assistant", "content": "six"},
]


def inspected(config: Path) -> InspectionAnswer:
    return inspection.inspect(load_config(config))


def trained(sample: InspectedSample) -> list[str]:
    return [piece.text for piece in sample.pieces if piece.trained]


@pytest.fixture
def talks(tmp_path: Path) -> Path:
    path = tmp_path / "talks.jsonl"
    path.write_text((json.dumps({"messages": TURNS}) + "\n") * 8)
    return path


def test_of_a_conversation_the_assistants_words_are_trained_and_the_template_is_seen(
    run_config: MakeConfig, talks: Path
) -> None:
    found = inspected(run_config(data__path=str(talks), data__sequence_length=64))
    [first, *_] = found.samples
    assert trained(first) == ["it is four<|im_end|>", "six<|im_end|>"]
    whole = "".join(piece.text for piece in first.pieces)
    assert whole.startswith("<|im_start|>user\nwhat is two and two?<|im_end|>")
    assert found.format == "messages"


def test_what_is_shown_as_trained_has_exactly_the_labels_of_the_run(
    run_config: MakeConfig, talks: Path
) -> None:
    config = run_config(data__path=str(talks), data__sequence_length=64, data__held_out=0.0)
    found = inspected(config)
    data = text_data(load_inputs(load_config(config)))
    rows = data.trained
    labels = np.concatenate([rows[index].labels.ravel() for index in range(len(rows))])
    trained_tokens = int((labels != IGNORED).sum())
    assert sum(found.lengths) == data.tokens
    assert found.trained_share == pytest.approx(trained_tokens / data.tokens)
    assert found.estimated_rows == len(rows)


def test_of_a_text_all_but_the_first_token_is_trained_on(run_config: MakeConfig) -> None:
    found = inspected(run_config(data__sequence_length=64))
    for sample in found.samples:
        seen, rest = sample.pieces
        assert (seen.trained, rest.trained) == (False, True)
        assert rest.text.endswith("<|endoftext|>")
        assert sample.trained_tokens == sample.tokens - 1


def test_a_document_longer_than_a_row_is_shown_as_far_as_its_first_row(
    run_config: MakeConfig, tmp_path: Path
) -> None:
    path = tmp_path / "long.txt"
    path.write_text("the fox jumps over the dog " * 60)
    found = inspected(run_config(data__path=str(path), data__sequence_length=16))
    [sample] = found.samples
    assert (sample.shown_tokens, sample.rows) == (16, -(-sample.tokens // 16))
    assert found.cut_documents_share == found.cut_tokens_share == 1.0


def test_of_a_large_file_a_part_is_read_and_the_rest_estimated(
    run_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sampling, "DOCUMENTS", 10)
    path = tmp_path / "many.jsonl"
    path.write_text('{"text": "the fox jumps over the dog"}\n' * 200)
    found = inspected(run_config(data__path=str(path)))
    assert found.sampled_documents == 10
    assert found.sampled_share == pytest.approx(0.05)
    assert found.estimated_documents == 200
    assert found.estimated_tokens == 200 * found.lengths[0]
    assert "estimated from 10 (5.0% of the data)" in inspection.page(found)


def test_stretches_put_together_are_the_whole_text(tokenizer_folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder)
    ids = tokenizer("the fox – and 犬 – jumps over it")["input_ids"]
    marks = [index % 3 == 1 for index in range(len(ids))]
    pieces = inspection.stretches(ids, marks, tokenizer)
    assert [piece.trained for piece in pieces[:4]] == [False, True, False, True]
    assert "the fox" in "".join(piece.text for piece in pieces)


def test_the_command_prints_json_for_programs_and_words_for_people(
    fluxtrain: Callable[..., subprocess.CompletedProcess[str]], run_config: MakeConfig, talks: Path
) -> None:
    config = run_config(data__path=str(talks), data__sequence_length=64)
    answer = fluxtrain("inspect", config, "--json")
    assert answer.returncode == 0, answer.stderr
    found = decoded(InspectionAnswer, answer.stdout)
    assert len(found.samples) == inspection.SAMPLES
    shown = inspection.page(found)
    assert "  trained on | it is four<|im_end|>" in shown.splitlines()
    assert "  context    | and three?<|im_end|>" in shown.splitlines()
    refused = fluxtrain("inspect")
    assert refused.returncode == 2
    assert "nothing to inspect" in refused.stderr
