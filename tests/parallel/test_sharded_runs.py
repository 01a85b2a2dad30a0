"""`fluxtrain train` with `parallel.mode: fsdp` on two gloo ranks, from its configuration to its
model."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from fluxtrain.config.schema import load_config
from fluxtrain.data.demo import train_tokenizer
from fluxtrain.events import events as ev
from fluxtrain.events.journal import read_events
from fluxtrain.train.checkpoint.checkpoint import read_checkpoint
from fluxtrain.train.checkpoint.recovery import locate
from fluxtrain.train.run import train
from tests.parallel import run_work as work
from tests.parallel.rank_pool import Ranks

SENTENCES = ["the quick brown fox jumps over the lazy dog", "what is two and two? it is four"] * 40
STEPS = 4


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A configuration of a small model and its data, both made here."""
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = tmp_path_factory.mktemp("sharded")
    train_tokenizer(SENTENCES, folder / "model", 300)
    torch.manual_seed(7)
    LlamaForCausalLM(LlamaConfig(
        vocab_size=300, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, bos_token_id=None, eos_token_id=0,
    )).save_pretrained(folder / "model")  # fmt: skip
    data = folder / "data.jsonl"
    data.write_text("".join(json.dumps({"text": text}) + "\n" for text in SENTENCES))
    path = folder / "run.yaml"
    path.write_text(
        f"model: {{path: {folder / 'model'}, dtype: float32}}\n"
        f"data: {{path: {data}, sequence_length: 16, held_out: 0.1, token_cache: 'off'}}\n"
        f"train: {{steps: {STEPS}, batch_rows: 4, learning_rate: 1e-3, warmup_steps: 0,\n"
        "  evaluate_every: 2, checkpoint_every: 2}\n"
        "placement: {device: cpu}\n"
    )
    return path


def _events(run_dir: Path, kind: type[Any]) -> list[Any]:
    return [event for event in read_events(run_dir / "events.ndjson") if isinstance(event, kind)]


def _losses(run_dir: Path) -> list[float]:
    return [event.loss for event in _events(run_dir, ev.StepFinished)]


def _weights(run_dir: Path) -> dict[str, torch.Tensor]:
    (path,) = (run_dir / "model").glob("*model.safetensors")
    return load_file(path)


def _trained(ranks: Ranks, config: Path, run_dir: Path, *overrides: str) -> Path:
    assert ranks.run(work.run, str(config), str(run_dir), list(overrides)) == [""] * ranks.count
    return run_dir


def test_two_ranks_train_evaluate_and_save_what_one_process_does(
    ranks: Ranks, config: Path, tmp_path: Path
) -> None:
    asked = ["samples.prompts=[the quick, what is]", "samples.every=2", "samples.max_new_tokens=4"]
    settings = load_config(config, asked)
    train(settings, locate(None, tmp_path / "one", settings))
    two = _trained(ranks, config, tmp_path / "two", "comm.profile_steps=1", *asked)
    assert _losses(two) == pytest.approx(_losses(tmp_path / "one"), abs=1e-4)
    evaluated, written = ev.EvaluationFinished, ev.SampleGenerated
    of_one = [event.loss for event in _events(tmp_path / "one", evaluated)]
    assert [event.loss for event in _events(two, evaluated)] == pytest.approx(of_one, abs=1e-4)
    samples = [(event.step, event.prompt, event.text) for event in _events(two, written)]
    assert samples == [
        (event.step, event.prompt, event.text)
        for event in _events(tmp_path / "one", written)
        if event.count == 2  # one more is of the finished model
    ]
    assert [step for step, *_ in samples] == [0, 0, 2, 2, 4, 4]
    found = json.loads((two / "result.json").read_text())
    peak, predicted = found["measured_device_peak_bytes"], found["predicted_device_peak_bytes"]
    assert peak == pytest.approx(predicted, rel=0.02)
    one, other = _weights(tmp_path / "one"), _weights(two)
    assert set(one) == set(other)
    assert max(float((one[name] - other[name]).abs().max()) for name in one) < 2e-3
    assert 0 < json.loads((two / "profiler" / "communication.json").read_text())["comm_share"] < 1
    assert (two / "profiler" / "rank-0.pt.trace.json").stat().st_size > 1000
    (line,) = (two / "results.jsonl").read_text().splitlines()
    assert json.loads(line)["comm_time_ms_by_op"].keys() >= {"all_gather"}


def test_a_run_is_resumed_by_the_same_ranks_and_by_one_process(
    ranks: Ranks, config: Path, tmp_path: Path
) -> None:
    same = ["train.schedule=constant"]
    profiled = [*same, "comm.profile_steps=9"]
    whole = _trained(ranks, config, tmp_path / "whole", *profiled)
    assert json.loads((whole / "profiler" / "communication.json").read_text())["steps"] == 1
    cut = _trained(ranks, config, tmp_path / "cut", "train.steps=2", *profiled)
    assert "no step was profiled" in (cut / "events.ndjson").read_text()
    shutil.copytree(cut, tmp_path / "alone")
    assert ranks.run(work.run, str(config), str(cut), same, "auto") == ["", ""]
    assert _losses(cut) == pytest.approx(_losses(whole), abs=1e-6)
    line = json.loads((cut / "results.jsonl").read_text().splitlines()[-1])
    assert len(line["losses"]) == STEPS
    since = [step.step_s * 1e3 for step in _events(cut, ev.StepFinished)[2:]]
    assert line["step_time_ms_mean"] == pytest.approx(sum(since) / len(since))
    settings = load_config(config, same)
    train(settings, locate("auto", tmp_path / "alone", settings))
    assert _losses(tmp_path / "alone") == pytest.approx(_losses(whole), abs=1e-4)


@pytest.mark.parametrize("is_damaged", [False, True])
def test_the_weights_of_the_best_evaluation_are_saved_from_all_ranks(
    ranks: Ranks, config: Path, tmp_path: Path, is_damaged: bool
) -> None:
    how = ["train.learning_rate=0.5", "train.schedule=constant", "train.evaluate_every=1"]
    cut = _trained(ranks, config, tmp_path / "cut", "train.steps=3", "train.final_model=best", *how)
    evaluated = {event.loss: event.step for event in _events(cut, ev.EvaluationFinished)}
    best = evaluated[min(evaluated)]
    assert best == 1
    if is_damaged:
        shard = max((cut / "checkpoints" / f"step-{best:08d}").glob("*.safetensors"))
        shard.write_bytes(bytes(shard.stat().st_size))
    how += ["train.final_model=best", "train.steps=4"]
    assert ranks.run(work.run, str(config), str(cut), how, "auto") == ["", ""]
    saved = _weights(cut)
    of = 4 if is_damaged else best
    kept = dict(read_checkpoint(cut / "checkpoints" / f"step-{of:08d}").load_shards())
    for name in ("model.embed_tokens", "lm_head"):
        assert torch.equal(saved[f"{name}.weight"], kept[name]["weight.weight_bits"])


@pytest.mark.parametrize(
    ("name", "told"), [("topk", "by topk between shards on 2 ranks"), ("none", "not compressed")]
)
def test_a_run_goes_on_with_another_compression_and_says_so_once(
    ranks: Ranks, config: Path, tmp_path: Path, name: str, told: str
) -> None:
    kept = ["comm.compress=int8", "comm.config={error_feedback: true}"]
    cut = _trained(ranks, config, tmp_path / "cut", "train.steps=2", *kept)
    assert ranks.run(work.run, str(config), str(cut), [f"comm.compress={name}"], "auto") == ["", ""]
    assert len(_losses(cut)) == STEPS
    (said,) = [e.text for e in _events(cut, ev.LogWritten) if "begins anew" in e.text]
    assert f"compressed by int8 between shards on 2 ranks, and are now {told}:" in said


def test_one_process_goes_on_where_ranks_compressed(
    ranks: Ranks, config: Path, tmp_path: Path
) -> None:
    cut = _trained(ranks, config, tmp_path / "cut", "train.steps=2", "comm.compress=int8")
    settings = load_config(config)
    train(settings, locate("auto", cut, settings))
    assert len(_losses(cut)) == STEPS


def test_a_dry_run_on_two_ranks_is_told_by_the_first(ranks: Ranks, config: Path) -> None:
    first, second = ranks.run(work.tried, str(config))
    assert second is None
    assert (first.steps, first.total_steps) == (3, STEPS)
    assert first.losses[0] > first.losses[-1]
    assert first.device_bytes.measured == pytest.approx(first.device_bytes.predicted, rel=0.02)


@pytest.mark.slow
def test_adapters_are_trained_and_saved_in_pefts_format(
    ranks: Ranks, config: Path, tmp_path: Path
) -> None:
    how = ["method.name=qlora", "method.rank=4", "comm.compress=int8"]
    run_dir = _trained(ranks, config, tmp_path / "adapters", *how)
    assert (run_dir / "model" / "adapter_model.safetensors").exists()
    line = json.loads((run_dir / "results.jsonl").read_text())
    assert line["compress_method"] == "int8"
    assert line["bytes_compressed_total"] > 0
    assert line["world_size"] == 2
    assert all(key in line for key in REQUIRED)


REQUIRED = (
    "run_name", "world_size", "model", "dataset", "max_length", "batch_size", "compress_method",
    "compress_config", "seed", "step_time_ms_mean", "step_time_ms_p50", "step_time_ms_p90",
    "tokens_per_s", "comm_time_ms_total", "comm_ratio", "comm_time_ms_by_op", "bytes_raw_total",
    "bytes_compressed_total", "compression_ratio", "train_loss", "val_loss", "val_ppl",
)  # fmt: skip


def test_auto_says_by_its_numbers_why_it_compresses_or_not(
    ranks: Ranks, config: Path, tmp_path: Path
) -> None:
    run_dir = _trained(ranks, config, tmp_path / "auto", "comm.compress=auto")
    (told,) = [e.text for e in _events(run_dir, ev.LogWritten) if "comm.compress=auto" in e.text]
    assert "ms for a block's gradients" in told


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["comm.compress=int7"], "did you mean int8?"),
        (["train.states=8bit"], "leave both out"),
        (["model.dtype=float16"], "bfloat16"),
        (["placement.disk=on"], "placement.disk=on is of models that stream"),
        (["method.name=qlora", "comm.gather=int8"], "leave it out"),
        (["comm.compress=auto", "fsdp.sharding_strategy=NO_SHARD"], "name a method"),
        (["comm.compress=randomk", "comm.config={error_feedback: true}"], '"scale": false'),
    ],
)
def test_what_a_sharded_run_cannot_do_is_refused_on_every_rank(
    ranks: Ranks, config: Path, tmp_path: Path, overrides: list[str], words: str
) -> None:
    for told in ranks.run(work.run, str(config), str(tmp_path / "run"), overrides):
        assert told.startswith("BadInput: ")
        assert words in told


def test_cures_of_a_lack_of_memory_are_settings_of_sharded_models(
    ranks: Ranks, config: Path, tmp_path: Path
) -> None:
    for told in ranks.run(work.run_without_memory, str(config), str(tmp_path / "run")):
        assert told.startswith("DoesNotFit: device memory ran out at step 1")
        assert "lower train.batch_rows, set fsdp.cpu_offload=true, shorten data" in told
        assert "placement." not in told


def test_the_rank_with_the_least_room_decides_on_automatic_rows(
    ranks: Ranks, config: Path, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    assert ranks.run(work.run_with_less_room_on_the_last, str(config), str(run_dir)) == ["", ""]
    (plan,) = _events(run_dir, ev.Planned)
    assert plan.batch_rows == 2
    (rows,) = [choice for choice in plan.choices if choice.name == "train.batch_rows"]
    assert (rows.value, rows.because) == ("2", "no more fit the rank with the least free memory")


def test_a_rank_that_is_configured_otherwise_is_refused(
    ranks: Ranks, config: Path, tmp_path: Path
) -> None:
    others: list[Any] = [["comm.compress=int8"], ["comm.compress=fp8"]]
    for told in ranks.run(work.run_otherwise, str(config), str(tmp_path / "run"), others):
        assert "comm.compress is int8 in rank 0 and fp8 in rank 1" in told


@pytest.mark.slow
def test_four_ranks_train_and_two_go_on_and_the_reverse(
    ranks: Ranks, four_ranks: Ranks, config: Path, tmp_path: Path
) -> None:
    how = ["train.schedule=constant", "comm.compress=int8", 'comm.config={"error_feedback": true}']
    whole = _trained(ranks, config, tmp_path / "whole", *how)
    by_four = _trained(four_ranks, config, tmp_path / "four", *how)
    assert _losses(by_four) == pytest.approx(_losses(whole), abs=2e-2)
    assert len(_events(by_four, ev.EvaluationFinished)) == STEPS // 2
    assert set(_weights(by_four)) == set(_weights(whole))
    for before, after in ((ranks, four_ranks), (four_ranks, ranks)):
        cut = tmp_path / f"cut-by-{before.count}"
        _trained(before, config, cut, "train.steps=2", *how)
        assert after.run(work.run, str(config), str(cut), how, "auto") == [""] * after.count
        assert _losses(cut) == pytest.approx(_losses(whole), abs=2e-2)
