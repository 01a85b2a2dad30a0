"""The trainer as a process: what it prints, what it tells a watcher, and whom it needs."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from fluxtrain.cli import main
from fluxtrain.events import events as ev
from fluxtrain.events.frames import decode_line
from fluxtrain.events.journal import read_events
from fluxtrain.events.run_folder.launch import start_trainer
from fluxtrain.events.run_folder.run_dir import RunDir

MakeConfig = Callable[..., Path]


@pytest.fixture(autouse=True)
def _one_thread(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("FLUXTRAIN_RUNS", str(tmp_path / "runs"))


def trained(*arguments: object) -> int:
    with pytest.raises(SystemExit) as caught:
        main(["train", *map(str, arguments)])
    assert isinstance(caught.value.code, int)
    return caught.value.code


def test_json_output_is_every_lifecycle_event_and_nothing_else(
    run_config: MakeConfig, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert trained(run_config(), "--run-dir", tmp_path / "run", "--json") == 0
    lines = capfd.readouterr().out.splitlines()
    events = [decode_line(line.encode()) for line in lines]
    assert isinstance(events[0], ev.Hello)
    assert isinstance(events[-1], ev.Done)
    journal = [e for e in read_events(tmp_path / "run" / "events.ndjson")
               if not isinstance(e, ev.Gauge)]  # fmt: skip
    assert [type(event) for event in events] == [type(event) for event in journal]


def test_a_plain_run_says_where_it_is_and_keeps_its_lines_in_the_log(
    run_config: MakeConfig, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert trained(run_config(), "--steps", "3") == 0
    said = capfd.readouterr().out
    (run_dir,) = (tmp_path / "runs").iterdir()
    assert f"run: {run_dir}" in said
    assert f"fluxtrain-tui --attach {run_dir}" in said
    log = (run_dir / "engine.log").read_text()
    for text in (
        "step 1/3",
        "step 3/3",
        "evaluation at step 3",
        "checkpoint of step 3",
        "finished",
    ):
        assert text in said
        assert text in log


def test_resume_auto_finds_the_newest_unfinished_run_of_the_same_configuration(
    run_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = run_config(train__checkpoint_every=1)
    calls = 0

    def broken(*_: object, **__: object) -> int:
        nonlocal calls
        calls += 1
        raise RuntimeError("the plug was pulled")

    with monkeypatch.context() as patch:
        patch.setattr("fluxtrain.methods.method.save_model", broken)
        assert trained(config) == 1
    (run_dir,) = (tmp_path / "runs").iterdir()
    assert RunDir(run_dir).liveness() == "failed"
    assert trained(config, "--resume", "auto") == 0
    assert RunDir(run_dir).liveness() == "finished"
    assert trained(config, "--resume", "auto") == 0  # a finished one is not gone on with
    assert len(list((tmp_path / "runs").iterdir())) == 2


def test_a_watcher_hears_the_run_and_the_log_has_each_line_once(
    run_config: MakeConfig, tmp_path: Path
) -> None:
    config = run_config(train__steps=3)
    trainer = start_trainer([str(config)], tmp_path / "run")
    heard: list[ev.AnyEvent] = []
    deadline = time.monotonic() + 200
    while trainer.exit_code() is None and time.monotonic() < deadline:
        heard += trainer.reader.poll()
        time.sleep(0.02)
    heard += trainer.reader.poll()
    assert trainer.exit_code() == 0
    assert isinstance(heard[0], ev.Hello)
    assert isinstance(heard[-1], ev.Done)
    assert [e.step for e in heard if isinstance(e, ev.StepFinished)] == [1, 2, 3]
    log = (tmp_path / "run" / "engine.log").read_text()
    assert log.count("step 3/3") == 1
    assert "Traceback" not in log
