"""From a file of every shape to what is trained on of it: nothing of a row is lost on the way."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fluxtrain.commands import inspection
from fluxtrain.config.schema import load_config
from fluxtrain.data.reading import sampling
from fluxtrain.errors import BadInput
from fluxtrain.events.answers.answers import InspectionAnswer
from fluxtrain.events.answers.asking import decoded
from fluxtrain.train.inputs import load_inputs
from tests.engine.runs import text_data

MakeConfig = Callable[..., Path]

TURNS = [{"role": "user", "content": "how many?"}, {"role": "assistant", "content": "two foxes"}]
SHAPES: dict[str, dict[str, Any]] = {
    "messages": {"messages": TURNS},
    "sharegpt": {
        "conversations": [
            {"from": "human", "value": "how many?"}, {"from": "gpt", "value": "two foxes"}
        ]
    },
    "alpaca": {"instruction": "how many?", "input": "", "output": "two foxes"},
    "completion": {"prompt": "how many?", "completion": "two foxes"},
    "parts": {
        "messages": [
            {**turn, "content": [{"type": "text", "text": turn["content"]}]} for turn in TURNS
        ]
    },
}  # fmt: skip


def write(folder: Path, *records: Any, name: str = "data.jsonl") -> str:
    path = folder / name
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(path)


@pytest.mark.parametrize("shape", SHAPES)
def test_of_every_shape_the_answer_is_trained_and_the_question_is_seen(
    run_config: MakeConfig, tmp_path: Path, shape: str
) -> None:
    path = write(tmp_path, *[SHAPES[shape]] * 12)
    found = inspection.inspect(load_config(run_config(data__path=path, data__sequence_length=32)))
    pieces = found.samples[0].pieces
    trained = "".join(piece.text for piece in pieces if piece.trained)
    seen = "".join(piece.text for piece in pieces if not piece.trained)
    assert "two foxes" in trained and "how many?" not in trained
    assert "how many?" in seen
    assert found.files[0].shape == {"parts": "messages"}.get(shape, shape)


def test_what_is_left_out_is_said_by_the_page_and_in_the_answer(
    fluxtrain: Callable[..., subprocess.CompletedProcess[str]],
    run_config: MakeConfig,
    tmp_path: Path,
) -> None:
    rows = [{"messages": TURNS, "id": 1, "source": "web"}] * 3
    config = run_config(data__path=write(tmp_path, *rows), data__sequence_length=32)
    answer = fluxtrain("inspect", config, "--json")
    assert answer.returncode == 0, answer.stderr
    found = decoded(InspectionAnswer, answer.stdout)
    assert found.read_share == 1
    ignored, repeated, ids, *_ = found.notes
    assert ignored == "keys that are left out: `id` (in 3 rows), `source` (in 3 rows)"
    assert repeated.startswith("repeated documents: 2 of 3") and ids.startswith("repeated ids: 2")
    page = inspection.page(found).splitlines()
    assert {ignored, repeated, ids} < set(page)
    assert page[0].endswith("because its name ends in .jsonl, and its first row has `messages` "
                            "with `role` and `content`")  # fmt: skip


def test_a_bad_row_far_behind_the_sample_is_found_before_the_run(
    run_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sampling, "DOCUMENTS", 4)
    rows = [{"text": f"the fox {i}"} for i in range(200)]
    path = write(tmp_path, *rows, {"text": 7})
    config = load_config(run_config(data__path=path, data__sequence_length=16))
    for act in (inspection.inspect, load_inputs):
        with pytest.raises(BadInput, match="line 201: `text` is a number"):
            act(config)
    monkeypatch.setattr(sampling, "READ_ON_S", 0.0)
    found = inspection.inspect(config)
    assert found.read_share < 0.1
    assert "of the data was looked at; --whole looks at all" in inspection.page(found)
    with pytest.raises(BadInput, match="line 201"):
        inspection.inspect(config, whole=True)


def test_every_file_of_a_list_is_sampled_and_weighed(
    run_config: MakeConfig, tmp_path: Path
) -> None:
    first = write(tmp_path, *({"text": f"the fox {i}"} for i in range(20)), name="a.jsonl")
    second = write(tmp_path, *({"text": f"the dog {i}"} for i in range(20)), name="b.jsonl")
    entries = [first, {"path": second, "weight": 3.0}]
    found = inspection.inspect(load_config(run_config(data__path=entries)))
    assert [file.weight for file in found.files] == [1.0, 3.0]
    assert found.estimated_documents == 20 + 3 * 20
    assert "b.jsonl: texts (text)" in inspection.page(found)
    assert "drawn 3 times an epoch" in inspection.page(found)


def test_held_out_data_of_its_own_is_evaluated_on_and_none_of_the_rest(
    run_config: MakeConfig, tmp_path: Path
) -> None:
    trained = write(tmp_path, *({"text": f"the fox {i}"} for i in range(60)), name="a.jsonl")
    held = write(tmp_path, *({"text": f"the dog {i}"} for i in range(20)), {"text": "the fox 3"},
                 name="b.jsonl")  # fmt: skip
    config = run_config(data__path=trained, data__held_out_path=held, data__sequence_length=16)
    data = text_data(load_inputs(load_config(config)))
    assert data.trained.token_count == data.tokens
    assert data.held_out.token_count > 0 and data.documents == 60
    assert any("held-out documents that are trained on too: 1" in line for line in data.told)
    found = inspection.inspect(load_config(config))
    assert [file.name for file in found.held_out_files] == [held]
    assert f"held out: {held}: texts (text), because" in inspection.page(found)
    missing = run_config(data__path=trained, data__held_out_path=str(tmp_path / "no.jsonl"))
    with pytest.raises(BadInput, match=r"no\.jsonl does not exist"):
        load_inputs(load_config(missing))


def test_a_run_says_what_it_reads_and_what_it_leaves_out(
    fluxtrain: Callable[..., subprocess.CompletedProcess[str]],
    run_config: MakeConfig,
    tmp_path: Path,
) -> None:
    rows = [{"text": f"the fox jumps over {i} dogs", "url": "x"} for i in range(60)]
    path = write(tmp_path, *rows, {"text": 1})
    settings = {"data__path": path, "data__sequence_length": 16, "train__steps": 2}
    refused = fluxtrain("train", run_config(**settings), "--run-dir", tmp_path / "refused")
    assert refused.returncode == 2
    assert "line 61: `text` is a number" in refused.stderr
    config = run_config(**settings, data__max_bad_rows=1)
    done = fluxtrain("train", config, "--run-dir", tmp_path / "run")
    assert done.returncode == 0, done.stderr
    said = done.stdout + done.stderr
    assert "keys that are left out: `url` (in 60 rows)" in said
    assert "bad rows, left out: 1" in said
    plan = json.loads((tmp_path / "run" / "plan.json").read_text())
    [choice] = [one for one in plan["choices"] if one["name"] == "data.format"]
    assert choice["value"] == "text" and "its first row has `text`" in choice["because"]
