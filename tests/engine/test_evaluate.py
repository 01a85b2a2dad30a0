"""What `fluxtrain evaluate` computes is what transformers alone computes, streamed or not."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from fluxtrain.data.batches import in_order
from fluxtrain.errors import BadInput, Diverged
from fluxtrain.events import events as ev
from fluxtrain.events.answers.answers import EvaluationAnswer
from fluxtrain.events.run_folder.run_dir import RunDir
from fluxtrain.plan import states
from fluxtrain.results import evaluate_model as evaluation
from fluxtrain.results.evaluate_model import EvaluationRequest, evaluate_model
from fluxtrain.results.model_request import ModelRequest
from tests.engine.runs import run
from tests.engine.test_lora_run import settings
from tests.engine.used_models import plain, plain_with_adapter

Folder = Callable[..., Path]


def evaluated(named: Path | str, data: Path | str | None, **given: Any) -> EvaluationAnswer:
    """Evaluate on the CPU, without words."""
    model = {
        name: given.pop(name) for name in ("offload", "dtype", "base", "cards") if name in given
    }
    request = ModelRequest(named=str(named), device="cpu", **model)
    asked = EvaluationRequest(model=request, data=None if data is None else str(data), **given)
    return evaluate_model(asked, lambda _: None)


def plainly(model: Any, folder: Path, data: Path, tokens: int, rows: int) -> float:
    """Return the mean loss by the model's own forward on the same rows."""
    from fluxtrain.config.data_settings import DataSettings
    from fluxtrain.data.prepare import DataSource, ModelLimits, prepare
    from fluxtrain.data.reading.request import read_request
    from fluxtrain.models.loading import ModelSource, load_model

    loaded = load_model(ModelSource(path=str(folder)))
    request = read_request(DataSettings(path=str(data)).model_dump())
    source = DataSource(request=request, sequence_length=tokens, held_out=0.0)
    limits = ModelLimits(
        embedding_rows=320, max_positions=128, pad_id=loaded.pad_id, packs=loaded.packs
    )
    found = prepare(source, loaded.tokenizer, limits).trained
    total, count = 0.0, 0
    with torch.no_grad():
        for batch in in_order(found, rows):
            total += float(model(**batch.inputs()).loss) * batch.predicted
            count += batch.predicted
    return total / count


@pytest.fixture
def talks(tmp_path: Path) -> Path:
    """A file of conversations; their answers alone are trained on."""
    rows = [
        {"messages": [
            {"role": "user", "content": f"what is {n} and two?"},
            {"role": "assistant", "content": f"it is four and {n} is six"},
        ]} for n in range(20)
    ]  # fmt: skip
    path = tmp_path / "talks.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.thinned(1)
@pytest.mark.parametrize("offload", ["max", "none"])
@pytest.mark.parametrize("family", ["llama", "gpt2", "qwen3"])
def test_the_loss_is_that_of_transformers_alone_bit_for_bit(
    family: str, offload: str, model_folder: Folder, talks: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = model_folder(family)
    found = evaluated(folder, talks, offload=offload, rows=1, sequence_length=64)
    assert found.loss == plainly(plain(folder), folder, talks, 64, 1)
    assert found.perplexity == math.exp(found.loss)
    assert ("streamed" in found.placed) == (offload == "max")
    assert 20 * 5 < found.tokens < 20 * 40, "the answers, not the questions"
    several = evaluated(folder, talks, offload=offload, sequence_length=64)
    assert several.batch_rows > 1 and several.loss == pytest.approx(found.loss, rel=1e-5)
    monkeypatch.setattr(evaluation, "WHOLE_LOGITS_BYTES", 0)
    fused = evaluated(folder, talks, offload=offload, rows=1, sequence_length=64)
    assert fused.loss == pytest.approx(found.loss, rel=1e-7)


def test_the_loss_on_several_cards_is_that_on_one(model_folder: Folder, talks: Path) -> None:
    folder = model_folder("llama")
    one, two = (evaluated(folder, talks, sequence_length=64, cards=cards) for cards in ("1", "2"))
    assert two.batch_rows > 2 and "2 parts" in two.placed
    assert two.loss == pytest.approx(one.loss, rel=1e-6), "in chunks, so that both compute"
    found = [evaluated(folder, talks, rows=1, sequence_length=64, cards=n) for n in ("1", "2")]
    assert found[0].loss == found[1].loss, "a row is no chunk"


@pytest.mark.parametrize("storage", ["plain", "nf4-double"])
@pytest.mark.thinned(1)
def test_a_run_is_evaluated_as_it_evaluated_itself(
    storage: Any, run_config: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(states, "LEAST_PACKED", 1024)
    method = {"name": "lora"} if storage == "plain" else {"name": "qlora", "base": storage}
    fast = {"train__steps": 3, "train__learning_rate": 0.02, "data__held_out": 0.2}
    events = run(run_config(**fast), tmp_path / "run", *settings(method))
    last = [event.loss for event in events if isinstance(event, ev.EvaluationFinished)][-1]
    found = evaluated(tmp_path / "run", None)
    assert found.loss == pytest.approx(last, rel=1e-5)
    assert found.data.startswith("held out of ") and found.base is not None
    base = tmp_path / "llama-float32"
    beside = plain_with_adapter(base, tmp_path / "run" / "model", torch.float32, storage)
    data = Path(json.loads((tmp_path / "run" / "run.json").read_text())["config"]["data"]["path"])
    expected = plainly(beside, base, data, 32, 1)
    assert evaluated(tmp_path / "run", data, sequence_length=32, rows=1).loss == pytest.approx(
        expected, rel=1e-6
    )


def test_less_data_than_a_row_is_evaluated(model_folder: Folder, tmp_path: Path) -> None:
    data = tmp_path / "few.jsonl"
    data.write_text('{"text": "the fox"}\n')
    found = evaluated(model_folder("llama"), data)
    assert found.rows == 1 and found.tokens >= 1


@pytest.mark.parametrize(
    ("dtype", "factor", "cure"),
    [
        ("auto", 3e38, "use an earlier checkpoint"),
        ("bf16", 3e38, "use --dtype fp32, and if"),
        ("fp16", 6e4, "use --dtype fp32, and if"),
    ],
)
def test_a_loss_that_is_not_finite_is_no_answer(
    dtype: str, factor: float, cure: str, model_folder: Folder, talks: Path
) -> None:
    folder = model_folder("llama")
    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"] = tensors["model.norm.weight"] * factor
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(Diverged, match="is (nan|inf)") as refused:
        evaluated(folder, talks, dtype=dtype)
    told = str(refused.value)
    assert cure in told and ("--dtype fp32" in told or dtype in ("auto", "fp32"))


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"data": None}, "is no run, which knows what it held out: name the data"),
        ({"data": "/nowhere.jsonl"}, "/nowhere.jsonl does not exist"),
        ({"rows": 0}, "--rows is 0: use at least 1"),
        ({"overrides": ("train.steps=1",)}, "--set train.steps=1: only settings of the data"),
        ({"overrides": ("data.fromat=plain",)}, "data.fromat"),
        ({"offload": "disk"}, "--offload is 'disk': use one of auto, none, weights, max"),
        ({"sequence_length": 500}, "data.sequence_length is 500 and the model knows 128"),
        ({"named": "./nowhere"}, "./nowhere does not exist: name a run"),
        ({"named": ""}, "MODEL is empty"),
    ],
)
def test_what_cannot_be_evaluated_is_refused_with_the_cure(
    given: dict[str, Any], words: str, model_folder: Folder, talks: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    def asked(*_: object, **__: object) -> None:
        raise AssertionError("the hub is asked")

    monkeypatch.setattr("huggingface_hub.snapshot_download", asked)
    asks = {"named": model_folder("llama"), "data": talks, **given}
    with pytest.raises(BadInput) as told:
        evaluated(asks.pop("named"), asks.pop("data"), **asks)
    assert words in str(told.value)


def test_a_folder_that_is_missing_beside_others_is_not_taken_for_a_hub_model(
    model_folder: Folder, talks: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = model_folder("llama")
    monkeypatch.chdir(folder.parent.parent)
    with pytest.raises(BadInput, match=r"nothing does not exist: check its name \(.* holds llama"):
        evaluated(f"{folder.parent.name}/nothing", talks)
    (folder / "tokenizer.json").unlink()
    with pytest.raises(BadInput, match="has no tokenizer"):
        evaluated(folder, talks)


def test_a_run_without_a_result_says_whether_to_wait_or_to_go_on(
    tmp_path: Path, talks: Path
) -> None:
    run = RunDir(tmp_path / "run")
    run.path.mkdir()
    run.run.write_text('{"config": {}}')
    with pytest.raises(BadInput, match="no model and no checkpoint .*`fluxtrain train --resume"):
        evaluated(run.path, talks)
    with run.lock():
        run.journal.write_text("")
        with pytest.raises(BadInput, match=r"\(it is running\).* wait for its first$"):
            evaluated(run.path, talks)
