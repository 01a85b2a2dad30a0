"""The best evaluation: its checkpoint is kept, its weights can be saved, and training can end."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from fluxtrain.config.schema import load_config
from fluxtrain.errors import BadInput, Interrupted
from fluxtrain.events import events as ev
from fluxtrain.events.journal import read_events
from fluxtrain.train.checkpoint import checkpoint as checkpoint_module
from fluxtrain.train.checkpoint.checkpoint import Checkpoint
from fluxtrain.train.checkpoint.run_state import RunState
from fluxtrain.train.checkpoint.shard_file import read_tensors
from fluxtrain.train.checkpoint.writer import CheckpointWriter
from tests.engine.runs import MakeConfig, of, run, weights

STEEP = {  # evaluations of this run fall, then rise: its steps are much too large
    "train__learning_rate": 0.1, "train__schedule": "constant", "train__warmup_steps": 0,
    "train__evaluate_every": 1, "train__checkpoint_every": "end", "train__steps": 6,
}  # fmt: skip


def checkpoints(run_dir: Path) -> list[int]:
    return sorted(int(path.name.partition("-")[2]) for path in run_dir.glob("checkpoints/step-*"))


def lowest(events: list[Any]) -> ev.EvaluationFinished:
    found: ev.EvaluationFinished = min(of(ev.EvaluationFinished, events), key=lambda e: e.loss)
    return found


def equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[k], other[k]) for k in one)


def test_the_best_weights_are_saved_where_they_are_wanted(
    run_config: MakeConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = run_config(**STEEP)
    events = run(config, tmp_path / "best", "train.final_model=best")
    best = lowest(events)
    assert 1 < best.step < 6, "the run is steep enough for a best step in between"
    # the same run that ends there: its last weights are the best of the longer one
    run(config, tmp_path / "short", f"train.steps={best.step}")
    run(config, tmp_path / "last")
    assert equal(weights(tmp_path / "best"), weights(tmp_path / "short"))
    assert not equal(weights(tmp_path / "best"), weights(tmp_path / "last"))
    assert checkpoints(tmp_path / "best") == [best.step, 6]
    assert checkpoints(tmp_path / "last") == [6]
    result = json.loads((tmp_path / "best" / "result.json").read_text())
    assert (result["model_step"], result["best_step"], result["step"]) == (best.step, best.step, 6)
    assert result["best_evaluation_loss"] == best.loss < result["evaluation_loss"]
    done = events[-1]
    assert (done.model_step, done.best_step, done.best_loss) == (best.step, best.step, best.loss)
    said = capsys.readouterr().out
    assert f"(step {best.step}, the best evaluation, {best.loss:.4f})" in said
    assert f"was at step {best.step}: train.final_model=best saves that one)" in said


def test_the_best_checkpoint_outlives_newer_ones_and_one_is_the_newest(
    run_config: MakeConfig, tmp_path: Path
) -> None:
    events = run(run_config(**STEEP), tmp_path / "two", "train.checkpoint_every=1")
    assert checkpoints(tmp_path / "two") == [lowest(events).step, 6]
    run(run_config(**STEEP), tmp_path / "one", "train.checkpoint_every=1",
        "train.keep_checkpoints=1")  # fmt: skip
    assert checkpoints(tmp_path / "one") == [6]


def test_training_ends_when_evaluations_stop_to_improve_and_a_resume_agrees(
    run_config: MakeConfig, tmp_path: Path
) -> None:
    config = run_config(**{**STEEP, "train__steps": 40}, train__early_stopping_patience=2)
    events = run(config, tmp_path / "run")
    (stopped,) = of(ev.StoppedEarly, events)
    best = lowest(events)
    assert stopped.step == best.step + 2 < 40
    assert (stopped.stale, stopped.best_step, stopped.best_loss) == (2, best.step, best.loss)
    assert [e.stale for e in of(ev.EvaluationFinished, events)][-3:] == [0, 1, 2]
    assert checkpoints(tmp_path / "run")[-1] == stopped.step
    assert events[-1].exit_code == 0
    before = weights(tmp_path / "run")
    again = run(config, tmp_path / "run", resume="auto")  # makes no further step
    assert len(of(ev.StepFinished, again)) == stopped.step
    assert len(of(ev.StoppedEarly, again)) == 2
    assert equal(before, weights(tmp_path / "run"))
    longer = run(config, tmp_path / "run", "train.early_stopping_patience=3", resume="auto")
    assert len(of(ev.StepFinished, longer)) > stopped.step


def test_a_run_that_was_stopped_keeps_best_and_patience(
    run_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = run_config(**{**STEEP, "train__steps": 40}, train__early_stopping_patience=3,
                        train__final_model="best")  # fmt: skip
    whole = run(config, tmp_path / "whole")
    best, ended = lowest(whole), of(ev.StoppedEarly, whole)[0]
    for stop in (best.step, ended.step - 1):
        run_dir = tmp_path / f"stopped-{stop}"
        with monkeypatch.context() as patch, pytest.raises(Interrupted):
            patch.setattr(
                "fluxtrain.train.requests.Requests.stop_code",
                property(lambda self, d=run_dir, s=stop: 130 if steps(d) >= s else None),
            )
            run(config, run_dir)
        events = run(config, run_dir, resume="auto")
        told = {(e.step, e.loss, e.best_step, e.stale) for e in of(ev.EvaluationFinished, events)}
        expected = {
            (e.step, e.loss, e.best_step, e.stale) for e in of(ev.EvaluationFinished, whole)
        }
        assert told == expected
        assert (events[-1].step, events[-1].model_step) == (ended.step, best.step)
        assert equal(weights(run_dir), weights(tmp_path / "whole"))


def steps(run_dir: Path) -> int:
    """Steps in the journal of a run that may not have begun."""
    journal = run_dir / "events.ndjson"
    return len(of(ev.StepFinished, list(read_events(journal)))) if journal.exists() else 0


def test_a_best_checkpoint_that_is_gone_or_damaged_is_said_and_the_last_weights_saved(
    run_config: MakeConfig, tmp_path: Path
) -> None:
    config = run_config(**STEEP)
    run_dir = tmp_path / "run"
    best = lowest(run(config, run_dir, "train.final_model=best"))
    (shard,) = list((run_dir / "checkpoints" / f"step-{best.step:08d}").glob("shard-00001*"))
    shard.write_bytes(b"0" * shard.stat().st_size)
    events = run(config, run_dir, "train.final_model=best", resume="auto")
    told = [e.text for e in of(ev.LogWritten, events) if f"at step {best.step}" in e.text]
    assert len(told) == 1 and "the weights of step 6, the last" in told[0]
    assert events[-1].model_step == 6
    run(config, tmp_path / "last")
    assert equal(weights(run_dir), weights(tmp_path / "last"))


def test_a_best_checkpoint_that_cannot_be_read_leaves_the_last_weights_whole(
    run_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = run_config(**STEEP)
    run(config, tmp_path / "last")
    reads, best = 0, CheckpointWriter.best

    def breaks(path: Path) -> dict[str, torch.Tensor]:
        nonlocal reads
        reads += 1
        if reads == 3:  # some of its groups are loaded already
            raise OSError(5, "Input/output error", str(path))
        return read_tensors(path)

    def found(*given: Any) -> Checkpoint | None:
        checkpoint = best(*given)
        monkeypatch.setattr(checkpoint_module, "read_tensors", breaks)
        return checkpoint

    monkeypatch.setattr(CheckpointWriter, "best", found)
    events = run(config, tmp_path / "run", "train.final_model=best")
    assert any("Input/output error" in log.text for log in of(ev.LogWritten, events))
    assert events[-1].model_step == 6 and reads > 3
    assert equal(weights(tmp_path / "run"), weights(tmp_path / "last"))


def test_evaluations_of_other_data_are_not_compared_with_those_before(
    run_config: MakeConfig, tmp_path: Path
) -> None:
    held_out = tmp_path / "held-out.txt"
    config = run_config(**STEEP, data__held_out_path=str(held_out))
    held_out.write_text("what is two and two? it is four\n\n" * 9, encoding="utf-8")
    run(config, tmp_path / "run", "train.steps=3")
    same = run(config, tmp_path / "run", "train.steps=4", resume=str(tmp_path / "run"))
    assert not [log for log in of(ev.LogWritten, same) if "held-out data is not" in log.text]
    held_out.write_text("a block streams through the device\n\n" * 9, encoding="utf-8")
    events = run(config, tmp_path / "run", resume=str(tmp_path / "run"))
    assert [log for log in of(ev.LogWritten, events) if "held-out data is not" in log.text]
    later = [e for e in of(ev.EvaluationFinished, events) if e.step > 4]
    assert later[-1].best_step in (5, 6)
    assert later[-1].best_loss == min(e.loss for e in later)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["train.early_stopping_patience=2", "data.held_out=0"], "data.held_out = 0 leaves"),
        (["train.final_model=best", "train.evaluate_every=end"], "makes only one"),
        (["train.early_stopping_threshold=-1"], "early_stopping_threshold = -1"),
    ],
)
def test_what_cannot_be_compared_is_refused(
    run_config: MakeConfig, overrides: list[str], words: str
) -> None:
    with pytest.raises(BadInput, match=words):
        load_config(run_config(), overrides)


def test_data_with_no_row_to_hold_out_is_refused(run_config: MakeConfig, tmp_path: Path) -> None:
    talk = [
        {"role": "user", "content": "two?"},
        {"role": "assistant", "content": "it is four, and three and three is six " * 4},
    ]
    data = tmp_path / "one.jsonl"
    data.write_text(json.dumps({"messages": talk}), encoding="utf-8")
    config = run_config(train__early_stopping_patience=2, train__batch_rows=1,
                        data__path=str(data), data__sequence_length=32)  # fmt: skip
    with pytest.raises(BadInput, match="no row of the data is held out"):
        run(config, tmp_path / "run")


def test_small_improvements_add_up_and_a_loss_that_is_not_finite_is_none() -> None:
    state = RunState()
    seen = []
    for state.step, loss in enumerate((3.0, 2.95, 2.89, math.nan, math.inf, 2.88, 2.5), start=1):
        state.evaluated(loss, threshold=0.1)
        seen.append((state.best_step, state.stale_evaluations))
    # 2.89 is 0.11 below 3.0; 2.88 is the best so far, but no improvement
    assert seen == [(1, 0), (2, 1), (3, 0), (3, 1), (3, 2), (6, 3), (7, 0)]
    assert RunState.from_json(json.loads(json.dumps(state.to_json()))) == state
