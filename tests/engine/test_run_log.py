"""engine.log: what it keeps, and that it leaves logging as a program set it."""

from __future__ import annotations

import logging
import signal
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

from fluxtrain.errors import BadInput
from fluxtrain.events.run_folder.launch import start_trainer
from fluxtrain.events.run_folder.run_dir import RunDir
from fluxtrain.train.observe.run_log import RunLog
from fluxtrain.train.session import Session
from fluxtui.sources.journal import last_words


@pytest.fixture
def log(tmp_path: Path) -> Iterator[RunLog]:
    opened = RunLog(tmp_path / "engine.log")
    yield opened
    opened.close()


def test_the_log_keeps_lines_warnings_and_tracebacks(log: RunLog) -> None:
    heard: list[str] = []
    log.tell(heard.append)
    log.printed("step 1/2  loss 3")
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.warn("a library warns", stacklevel=1)
    logging.getLogger("fluxtrain").warning("the engine warns")
    try:
        raise KeyError("slot 7")
    except KeyError as error:
        log.traceback(error)
    text = log.path.read_text()
    for part in ("step 1/2", "a library warns", "the engine warns", "Traceback", "slot 7"):
        assert part in text
    assert heard == ["the engine warns"]


def told_by_logging() -> list[object]:
    names = ("fluxtrain", "fluxtrain.run", "py.warnings", "transformers", "torch")
    loggers = [logging.getLogger(name) for name in names]
    told = [(x.level, x.propagate, list(x.handlers)) for x in loggers]
    return [*told, warnings.showwarning]


@pytest.mark.parametrize("captures", [False, True])
def test_a_log_leaves_logging_and_warnings_as_a_program_set_them(
    captures: bool,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with warnings.catch_warnings():
        logging.captureWarnings(captures)
        caplog.set_level(logging.ERROR, "fluxtrain")
        monkeypatch.setattr(logging.getLogger("fluxtrain"), "propagate", False)
        before = told_by_logging()
        log = RunLog(tmp_path / "engine.log")
        log.tell(lambda _: None)
        assert told_by_logging() != before
        log.close()
        after = told_by_logging()
        logging.captureWarnings(False)
    assert after == before


def test_a_log_that_is_a_link_is_refused_and_what_it_points_to_stays(tmp_path: Path) -> None:
    (tmp_path / "others").write_text("kept")
    (tmp_path / "engine.log").symlink_to(tmp_path / "others")
    with pytest.raises(BadInput, match="--run-dir"):
        RunLog(tmp_path / "engine.log")
    with pytest.raises(BadInput, match="--run-dir"):
        start_trainer(["--demo"], tmp_path, ["false"])
    assert (tmp_path / "others").read_text() == "kept"


def test_a_session_that_cannot_be_had_gives_back_what_it_took(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "run")
    before = told_by_logging()
    with pytest.raises(BadInput, match="--live-fd"):
        Session(run, live_fd=2**20)
    assert told_by_logging() == before
    with run.lock():
        pass


def test_a_crash_in_native_code_is_in_the_log_and_in_words(tmp_path: Path) -> None:
    program = (
        "import os, sys\nfrom pathlib import Path\n"
        "from fluxtrain.train.observe.run_log import RunLog\n"
        "RunLog(Path(sys.argv[1]) / 'engine.log')\nos.abort()\n"
    )
    ended = subprocess.run([sys.executable, "-c", program, tmp_path], check=False)
    assert ended.returncode == -signal.SIGABRT
    assert "native code ended the process (Aborted)" in last_words(RunDir(tmp_path))
