"""Trackers get what the journal has, and never hold a training up, whatever they do."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from fluxtrain.config.schema import RunConfig, load_config, validate
from fluxtrain.errors import BadInput
from fluxtrain.events import events as ev
from fluxtrain.train.checkpoint.recovery import locate
from fluxtrain.train.observe import tracking as opening
from fluxtrain.train.observe.tracking import (
    TrackedRun,
    TrackerFeed,
    Trackers,
    refuse_missing_trackers,
)
from fluxtrain.train.run import train
from tests.engine import tracker_fakes as fakes
from tests.engine.runs import MakeConfig, of, run


def step(number: int) -> ev.StepFinished:
    return ev.StepFinished(
        step=number, total_steps=9, epoch=0.5, loss=1.0 / number, learning_rate=1e-3,
        grad_norm=float("nan"), tokens=10, total_tokens=10 * number, step_s=0.1, tokens_per_s=100.0,
        phases_s={"forward": 0.05}, stalls_s={},
    )  # fmt: skip


class Kept:
    """A tracker that keeps what it gets; `act` comes before each report."""

    def __init__(self, act: Callable[[], object] = lambda: None) -> None:
        self.act, self.told = act, []  # type: ignore[var-annotated]

    def start(self, run: TrackedRun) -> str:
        self.told.append(("start", run.known_id, run.first_step))
        return run.known_id or "an id"

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self.act()
        self.told.append((step, dict(values)))

    def write(self, step: int, samples: Sequence[tuple[str, str]]) -> None:
        self.told.append((step, list(samples)))

    def finish(self, *, failed: bool) -> None:
        self.told.append(("finish", failed))


def feed(tracker: Any, folder: Path, said: list[str], limit: int = 100) -> TrackerFeed:
    facts = TrackedRun(project="p", name="n", folder=folder)
    return TrackerFeed("kept", lambda: tracker, facts, said.append, limit)


def ended(one: TrackerFeed, limit_s: float = 20.0) -> None:
    one.end(failed=False)
    one.wait(time.monotonic() + limit_s)


def test_numbers_go_in_order_with_the_newest_memory_and_without_what_is_not_finite(
    tmp_path: Path,
) -> None:
    tracker, said = Kept(), list[str]()
    one = feed(tracker, tmp_path, said)
    memory: dict[str, Any] = dict.fromkeys(ev.MemorySampled.__struct_fields__[4:])
    one.put(ev.MemorySampled(**{**memory, "device_by": {}, "host_arena_bytes": 0,
                                "host_pinned_bytes": 0, "host_rss_bytes": 512}))  # fmt: skip
    one.put(step(1))
    one.put(ev.EvaluationFinished(step=1, loss=2.0, count=9, seconds=0.5, metrics={"loss": 2.0},
                                  best_step=1, best_loss=2.0))  # fmt: skip
    for number in (1, 2):
        one.put(ev.SampleGenerated(step=1, prompt=f"p{number}", text="t", number=number, count=2))
    one.put(ev.LogWritten(level="info", text="not for trackers"))
    ended(one)
    start, first, evaluated, samples, finish = tracker.told
    assert (start, finish, said) == (("start", None, 0), ("finish", False), [])
    assert first[0] == 1 and first[1]["train/loss"] == 1.0 and first[1]["phases_s/forward"] == 0.05
    assert first[1]["memory/host_rss_bytes"] == 512.0 and "train/grad_norm" not in first[1]
    assert evaluated == (1, {"eval/loss": 2.0, "eval/seconds": 0.5, "eval/best_loss": 2.0})
    assert samples == (1, [("p1", "t"), ("p2", "t")])


def test_a_tracker_that_hangs_holds_nothing_up_and_what_it_misses_is_said(tmp_path: Path) -> None:
    forever = threading.Event()
    tracker, said = Kept(lambda: forever.wait(60) and None), list[str]()
    one = feed(tracker, tmp_path, said, limit=10)
    started_s = time.monotonic()
    for number in range(1, 2001):
        one.put(step(number))
    ended(one, limit_s=0.2)
    assert time.monotonic() - started_s < 5
    forever.set()
    assert one.dropped > 1900
    assert "does not keep up: 10 reports wait for it" in said[0]
    assert "did not end within" in said[1] and "reports are missing in kept" in said[2]
    assert len(said) == 3


def test_a_tracker_that_fails_for_a_while_is_asked_again_and_one_that_goes_on_is_given_up(
    tmp_path: Path,
) -> None:
    def failing(times: int) -> Callable[[], None]:
        left = [times]

        def act() -> None:
            left[0] -= 1
            if left[0] >= 0:
                raise ConnectionError("the server is down\nsecond line")

        return act

    for times, dropped, last in ((2, 2, "2 reports are missing"), (9, 3, "3 reports are missing")):
        tracker, said = Kept(failing(times)), list[str]()
        one = feed(tracker, tmp_path / str(times), said)
        for number in range(1, 12):
            one.put(step(number))
        ended(one)
        assert one.lost == dropped and last in said[-1]
        assert "refused a report (ConnectionError: the server is down); the training" in said[0]
        assert any("failed 3 times in a row" in text for text in said) == (times == 9)


def test_one_that_cannot_start_is_said_once(tmp_path: Path) -> None:
    def broken() -> Any:
        raise ImportError("wandb needs a newer protobuf")

    said: list[str] = []
    facts = TrackedRun(project="p", name="n", folder=tmp_path)
    one = TrackerFeed("wandb", broken, facts, said.append)
    one.put(step(1))
    ended(one)
    assert said == ["wandb gets no reports of this run: it could not be started (ImportError: "
                    "wandb needs a newer protobuf); the training goes on"]  # fmt: skip


def test_a_resumed_run_goes_on_with_the_id_of_its_first_process(tmp_path: Path) -> None:
    for known in (None, "an id"):
        tracker = Kept()
        ended(feed(tracker, tmp_path, []))
        assert tracker.told[0] == ("start", known, 0)
    (tmp_path / "trackers" / "kept.json").write_text("[broken")
    tracker = Kept()
    ended(feed(tracker, tmp_path, []))
    assert tracker.told[0] == ("start", None, 0)


def test_a_run_trains_the_same_beside_trackers_that_hang_or_fail(
    run_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    forever = threading.Event()
    hung, broken = Kept(lambda: forever.wait(60) and None), Kept(lambda: 1 // 0 and None)
    made: Any = {"tensorboard": lambda: hung, "wandb": lambda: broken}
    monkeypatch.setattr(opening, "TRACKERS", made)
    monkeypatch.setattr(opening, "END_LIMIT_S", 0.2)
    monkeypatch.setattr(opening, "_is_installed", lambda name: True)
    config = run_config(train__steps=4)
    plain = run(config, tmp_path / "plain")
    events = run(config, tmp_path / "run", "trackers.report_to=[tensorboard,wandb]")
    forever.set()
    losses = [[e.loss for e in of(ev.StepFinished, found)] for found in (plain, events)]
    assert losses[0] == losses[1]
    assert isinstance(events[-1], ev.Done) and events[-1].exit_code == 0
    told = [e.text for e in of(ev.LogWritten, events)]
    assert any(text.startswith("tensorboard did not end within") for text in told)
    assert any("wandb gets no reports of this run: it failed 3 times" in text for text in told)


def test_missing_packages_are_named_with_the_command_before_anything_is_loaded() -> None:
    named = validate({"trackers": {"report_to": ["wandb", "mlflow"]}}).trackers
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(opening, "_is_installed", lambda name: name == "mlflow")
        with pytest.raises(BadInput, match=r"wandb, which is not installed: pip install "
                                           r"'fluxtrain\[wandb\]', or leave it out"):  # fmt: skip
            refuse_missing_trackers(named)
    with pytest.raises(BadInput, match="trackers.report_to"):
        validate({"trackers": {"report_to": ["comet"]}})


# --- the adapters, beside modules with the signatures of the real ones ----------------------------


def reported(tmp_path: Path, name: str, *, failed: bool = False, first_step: int = 0) -> list[str]:
    """Report two steps, an evaluation and a sample to one tracker; what was warned of."""
    said: list[str] = []
    raw = {"trackers": {"report_to": [name], "project": "our project", "offline": True}}
    folder = tmp_path / "20261121-031500-demo"
    folder.mkdir(exist_ok=True)
    config: RunConfig = validate(raw)
    trackers = Trackers(config, folder, first_step, said.append)
    for number in (first_step + 1, first_step + 2):
        trackers.put(step(number))
    trackers.put(ev.EvaluationFinished(step=first_step + 2, loss=2.0, count=9, seconds=0.5))
    trackers.put(ev.SampleGenerated(step=first_step + 2, prompt="two?", text="four"))
    (folder / "a.png").write_bytes(b"a picture")
    trackers.put(ev.SampleGenerated(step=first_step + 2, prompt="red", text="a.png", path="a.png"))
    trackers.close(failed=failed)
    return said


def test_wandb_gets_one_run_over_two_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: fakes.Told = []
    fakes.installed(monkeypatch, fakes.wandb(told))
    assert reported(tmp_path, "wandb") == []
    assert reported(tmp_path, "wandb", first_step=2, failed=True) == []
    inits = [entry for entry in told if entry[0] == "init"]
    assert inits[0] == inits[1]  # with the id of the first
    assert inits[0][1:3] == ("our project", "20261121-031500-demo")
    assert inits[0][4:] == ("offline", "allow") and len(inits[0][3]) == 12
    assert [entry[1] for entry in told if entry[0] == "log"] == [1, *[2] * 4, 3, *[4] * 4]
    assert ("log", 2, {"samples": ((2, "two?", "four"),)}) in told
    assert ("log", 2, {"samples": [("a.png", "red")]}) in told
    assert [entry for entry in told if entry[0] == "finish"] == [("finish", 0), ("finish", 1)]


def test_trackio_gets_one_run_and_prints_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    told: fakes.Told = []
    fakes.installed(monkeypatch, fakes.trackio(told))
    assert reported(tmp_path, "trackio") == reported(tmp_path, "trackio", first_step=2) == []
    inits = [entry for entry in told if entry[0] == "init"]
    assert inits[0] == inits[1] and inits[0][3] == "allow"
    assert inits[0][2].startswith("20261121-031500-demo-")
    assert inits[0][4]["train.schedule"] == "cosine"
    assert ("log", 2, {"samples/1": ("a.png", "red")}) in told
    assert capsys.readouterr().out == ""


def test_mlflow_gets_parameters_metrics_and_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: fakes.Told = []
    runs: dict[str, str] = {}
    fakes.installed(monkeypatch, *fakes.mlflow(told, runs))
    assert reported(tmp_path, "mlflow", failed=True) == []
    assert runs == {"run0": "FAILED"}
    assert reported(tmp_path, "mlflow", first_step=2) == []
    assert runs == {"run0": "FINISHED"}
    assert told.count(("experiment", "our project")) == 1
    assert ("param", "train.schedule", "cosine") in told
    losses = [entry[2:] for entry in told if entry[:2] == ("metric", "train/loss")]
    assert losses == [(n, 1.0 / n) for n in (1, 2, 3, 4)]
    assert ("text", "samples/step-00000002.md", "**two?**\n\nfour") in told
    assert ("file", "samples", "a.png") in told


def test_tensorboards_own_reader_finds_the_run_and_its_resume(
    run_config: MakeConfig, tmp_path: Path
) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    config = run_config(train__steps=4, train__checkpoint_every=2, samples__prompts=["the"],
                        trackers__report_to=["tensorboard"])  # fmt: skip
    events = run(config, tmp_path / "run")
    again = str(tmp_path / "run" / "checkpoints" / "step-00000002")
    train(load_config(config), locate(again, None, load_config(config)))
    found = EventAccumulator(str(tmp_path / "run" / "tensorboard"))
    found.Reload()
    told = [(e.step, e.value) for e in found.Scalars("train/loss")]
    expected = [(e.step, e.loss) for e in of(ev.StepFinished, events)]
    assert [n for n, _ in told] == [1, 2, 3, 4] == [n for n, _ in expected]  # once each
    assert [v for _, v in told] == pytest.approx([v for _, v in expected])
    assert [e.step for e in found.Scalars("eval/loss")] == [2, 4]
    assert "samples/1/text_summary" in found.Tags()["tensors"]
    names = json.loads((tmp_path / "run" / "trackers" / "tensorboard.json").read_text())
    assert names["id"].endswith("tensorboard")


def test_a_process_does_not_wait_for_a_tracker_that_hangs_in_its_last_words() -> None:
    code = (
        "import atexit, sys, threading, time\n"
        "from fluxtrain.commands.output import leave\n"
        "from fluxtrain.train.observe.tracking import THREAD\n"
        "atexit.register(time.sleep, 100)\n"
        "threading.Thread(target=time.sleep, args=(100,), name=THREAD + 'x', daemon=True).start()\n"
        "print('told')\n"
        "leave(5)"
    )
    ended = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert (ended.returncode, ended.stdout) == (5, "told\n")
