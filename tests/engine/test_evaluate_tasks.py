"""`fluxtrain evaluate --tasks`: local tasks alone, and the likelihoods of transformers itself."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer
from typer.testing import CliRunner

from fluxtrain.cli import app
from fluxtrain.errors import BadInput
from fluxtrain.results import scores
from fluxtrain.results.evaluate_tasks import SETTINGS, evaluate_tasks
from fluxtrain.results.model_request import ModelRequest
from fluxtrain.results.opened import open_model
from fluxtrain.results.task_files import read_tasks
from tests.engine.used_models import plain

TASK = """\
task: sums
dataset_path: json
dataset_kwargs: {data_files: {test: rows.jsonl}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: choices
doc_to_target: gold
metric_list: [{metric: acc}, {metric: acc_norm}]
"""


def made(folder: Path, rows: int = 40, task: str = TASK) -> Path:
    draw = random.Random(3)
    folder.mkdir(exist_ok=True)
    with (folder / "rows.jsonl").open("w") as file:
        for _ in range(rows):
            choices = [str(draw.randrange(10**n)) for n in (1, 2, 4)]
            row = {"question": f"{draw.randrange(9)} is", "choices": choices,
                   "gold": draw.randrange(3)}  # fmt: skip
            file.write(json.dumps(row) + "\n")
    (folder / "sums.yaml").write_text(task)
    return folder


@pytest.mark.parametrize(
    ("right", "wrong", "told"),
    [
        ("dataset_path: json", "dataset_path: allenai/ai2_arc", "save the rows beside it"),
        ("dataset_path: json", "dataset_path: ./script.py", "save the rows beside it"),
        ("{data_files: {test: rows.jsonl}}", "{}", "save the rows beside it"),
        ("rows.jsonl}", "../rows.jsonl}", "put it there"),
        ("rows.jsonl}", "https://x.example/rows.jsonl}", "put it there"),
        ("doc_to_target: gold", "doc_to_target: !function code.gold", "line 8: it names code"),
        ('"{{question}}"', "\"{{''.__class__.__mro__}}\"", "which reach code"),
        ("{metric: acc}", "{metric: rouge}", "would be downloaded"),
        ("task: sums", "include: other.yaml\ntask: sums", "write its settings"),
        ("task: sums", "task: [arc_easy]", "names no task"),
        ("multiple_choice", "generate_until", "use one of multiple_choice"),
        ("task: sums", "task: [", "cannot be read"),
    ],
)
def test_what_asks_for_the_hub_or_for_code_is_refused_with_the_cure(
    tmp_path: Path, right: str, wrong: str, told: str
) -> None:
    assert TASK.count(right) == 1
    folder = made(tmp_path / "tasks", 2, TASK.replace(right, wrong))
    with pytest.raises(BadInput, match=told):
        read_tasks(folder)


def test_tasks_are_read_with_whole_paths_and_names_of_their_own(tmp_path: Path) -> None:
    folder = made(tmp_path / "tasks", 2)
    (task,) = read_tasks(folder)
    assert task["dataset_kwargs"]["data_files"] == {"test": [str(folder / "rows.jsonl")]}
    (folder / "again.yml").write_text(TASK)
    with pytest.raises(BadInput, match="two tasks 'sums'"):
        read_tasks(folder)
    with pytest.raises(BadInput, match="has no task"):
        read_tasks(tmp_path)
    ended = CliRunner().invoke(app, ["evaluate", str(tmp_path), "data", "--tasks", str(folder)])
    assert "leave DATA" in str(ended.exception)


@torch.no_grad()
def test_scores_are_those_of_whole_logits(
    model_folder: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scores, "CHUNK_BYTES", 20_000)  # a few tokens a chunk
    base = model_folder("llama")
    model, draw = plain(base).float(), random.Random(4)
    requests: list[scores.Request] = [
        (None, [draw.randrange(90) for _ in range(length)], [draw.randrange(90) for _ in range(n)])
        for length, n in ((3, 2), (9, 4), (1, 1), (7, 9))
    ]
    context = 10
    likely = int(model(torch.tensor([requests[1][1]])).logits[0, -1].argmax())
    requests += [(None, requests[1][1], [likely]), (None, requests[1][1], [5])]  # choices
    opened = open_model(ModelRequest(named=str(base), device="cpu", dtype="fp32"), lambda _: None)
    told = scores.Scores(opened, None, lambda _: None)
    found = told.of(requests, context)
    opened.close()
    assert told.most_rows == 5 and found[4][1] and not found[5][1]
    for (_, before, text), (score, is_likeliest) in zip(requests, found, strict=True):
        tokens = [*before, *text][-context - 1 :]
        steps = model(torch.tensor([tokens[:-1]])).logits[0, -len(text) :].log_softmax(-1)
        chosen = steps.gather(1, torch.tensor(text)[:, None])
        assert score == pytest.approx(float(chosen.sum()), abs=1e-3)
        assert is_likeliest == (steps.argmax(-1).tolist() == text)


@pytest.mark.parametrize(
    ("before", "text", "told"),
    [
        ([], [4], "no token stands before ' b'"),
        ([3], [], "' b' has no token behind 'a'"),
        ([3], [4] * 11, "' b' has 11 tokens, and the model takes 10"),
    ],
)
def test_what_has_no_likelihood_is_refused(
    model_folder: Callable[..., Path], before: list[int], text: list[int], told: str
) -> None:
    named = str(model_folder("llama"))
    opened = open_model(ModelRequest(named=named, device="cpu", dtype="fp32"), lambda _: None)
    asked: list[scores.Request] = [(None, [1, 2], [3] * 9), (("a", " b"), before, text)]
    with pytest.raises(BadInput, match=told):
        scores.Scores(opened, None, lambda _: None).of(asked, 10)
    opened.close()


@pytest.mark.slow
@pytest.mark.parametrize(
    "row",
    [
        {"question": "a", "choices": ["", "b"], "gold": 0},
        {"question": "a", "choices": ["b"], "gold": 7},
        {"question": "a", "choices": ["x y " * 999], "gold": 0},
        {},
    ],
)
def test_rows_that_lm_eval_cannot_use_are_the_users_mistake(
    model_folder: Callable[..., Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    row: dict[str, Any],
) -> None:
    for name in (*SETTINGS, "HF_XET_HIGH_PERFORMANCE"):  # lm-eval sets the last
        monkeypatch.setenv(name, "1")
    pytest.importorskip("lm_eval", reason="needs the extra `eval`")
    folder = made(tmp_path / "tasks")
    (folder / "rows.jsonl").write_text(f"{json.dumps(row)}\n" if row else "")
    request = ModelRequest(named=str(model_folder("llama")), device="cpu", dtype="fp32")
    with pytest.raises(BadInput):
        evaluate_tasks(request, folder, 4, lambda _: None)


@pytest.mark.slow
def test_accuracies_are_those_of_transformers_own_logits(
    model_folder: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in (*SETTINGS, "HF_XET_HIGH_PERFORMANCE"):  # lm-eval sets the last
        monkeypatch.setenv(name, "1")
    pytest.importorskip("lm_eval", reason="needs the extra `eval`")
    base, folder = model_folder("llama"), made(tmp_path / "tasks")
    request = ModelRequest(named=str(base), device="cpu", dtype="fp32")
    found = evaluate_tasks(request, folder, 4, lambda _: None)
    model, tokenizer = plain(base).float(), AutoTokenizer.from_pretrained(base)
    rows = [json.loads(line) for line in (folder / "rows.jsonl").read_text().splitlines()]
    right = {"acc": 0, "acc_norm": 0}
    for row in rows:
        sums = [_log(model, tokenizer, row["question"], f" {one}") for one in row["choices"]]
        means = [one / len(text) for one, text in zip(sums, row["choices"], strict=True)]
        right["acc"] += sums.index(max(sums)) == row["gold"]
        right["acc_norm"] += means.index(max(means)) == row["gold"]
    told = {one.metric: one.value for one in found.results}
    assert told == {name: count / len(rows) for name, count in right.items()}
    assert {one.rows for one in found.results} == {len(rows)}


@pytest.mark.slow
@pytest.mark.skipif(find_spec("lm_eval") is None, reason="needs the extra `eval`")
def test_the_benchmark_runs_on_a_small_model() -> None:
    sizes = ["--shape", "tiny", "--device", "cpu", "--texts", "8", "--length", "64", "--rows", "4"]
    script = Path(__file__).parents[2] / "bench" / "bench_evaluate.py"
    done = subprocess.run([sys.executable, script, *sizes], capture_output=True, check=True)
    loss, asked, ratio = map(json.loads, done.stdout.splitlines())
    assert loss["batch_rows"] == asked["batch_rows"] == 4
    assert loss["tokens"] == pytest.approx(asked["tokens"], rel=0.02) and asked["tokens"] >= 500
    both = asked["tokens_per_s"] / loss["tokens_per_s"]
    assert ratio["log_likelihoods_of_loss"] == pytest.approx(both, abs=1e-3)


@torch.no_grad()
def _log(model: Any, tokenizer: Any, context: str, answer: str) -> float:
    whole, begin = tokenizer(context + answer).input_ids, len(tokenizer(context).input_ids)
    steps = model(torch.tensor([whole])).logits[0].log_softmax(-1)
    return sum(float(steps[at - 1, whole[at]]) for at in range(begin, len(whole)))
