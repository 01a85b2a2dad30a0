"""The ring of a run's steps where it cannot be written."""

from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path

import pytest

from fluxtrain.config.schema import load_config
from fluxtrain.errors import BadInput
from fluxtrain.events.events import LogWritten, StepFinished
from fluxtrain.events.journal import read_events
from fluxtrain.events.trace import ring
from fluxtrain.train.checkpoint.recovery import locate
from fluxtrain.train.run import train


@pytest.mark.parametrize(
    "error", [OSError(errno.EROFS, "Read-only file system"), BadInput("timeline.ring is a link")]
)
def test_a_ring_that_cannot_be_written_is_told_and_the_training_goes_on(
    run_config: Callable[..., Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    error: Exception,
) -> None:
    def refused(*_: object) -> int:
        raise error

    monkeypatch.setattr(ring, "open_to_write", refused)
    config = load_config(run_config(train__steps=2), [])
    run_dir = tmp_path / "run"
    train(config, locate(None, run_dir, config))
    events = list(read_events(run_dir / "events.ndjson"))
    assert sum(isinstance(event, StepFinished) for event in events) == 2
    warnings = [e.text for e in events if isinstance(e, LogWritten) and "timeline" in e.text]
    assert len(warnings) == 1 and "timeline.ring" in warnings[0]
