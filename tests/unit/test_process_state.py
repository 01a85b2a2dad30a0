"""A test that leaves the process other than it was is found out."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.process_state import changes, process_state


@pytest.fixture
def put_back(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What the tests below leave changed."""
    monkeypatch.chdir(Path.cwd())
    monkeypatch.setenv("FLUXTRAIN_LEFT", "before")
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    terminate = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, terminate)


LEFT: list[tuple[Callable[[], object], str]] = [
    (lambda: os.environ.update(FLUXTRAIN_LEFT="after"), "os.environ"),
    (lambda: os.environ.pop("FLUXTRAIN_LEFT"), "os.environ"),
    (lambda: os.chdir("/"), "the working directory"),
    (lambda: signal.signal(signal.SIGTERM, signal.SIG_IGN), "signal handlers"),
    (lambda: setattr(sys, "excepthook", print), "sys.excepthook"),
]


@pytest.mark.parametrize(("leave", "name"), LEFT)
def test_what_is_left_changed_is_named(
    leave: Callable[[], object], name: str, put_back: None
) -> None:
    before = process_state()
    assert changes(before, process_state()) == []
    leave()
    told = changes(before, process_state())
    assert told[0] == name
    assert "FLUXTRAIN_LEFT" in told[-1] or name != "os.environ"


def test_torch_counts_from_when_it_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    with monkeypatch.context() as patch:
        patch.delitem(sys.modules, "torch")
        before = process_state()
    assert changes(before, process_state()) == []
    before = process_state()
    torch.set_default_dtype(torch.float64)
    after = process_state()
    torch.set_default_dtype(torch.float32)
    assert changes(before, after) == ["torch's default dtype"]
