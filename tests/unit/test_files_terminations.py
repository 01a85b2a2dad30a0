"""SIGTERM and SIGHUP clear away what a command has begun, and end it in words."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from fluxtrain.commands.verify_resume import verify_resume
from fluxtrain.config.schema import demo_config
from fluxtrain.errors import EXIT_TERMINATED, Interrupted
from fluxtrain.files.terminations import terminations_told
from fluxtrain.models.export import save_folder

SIGNALS = [signal.SIGTERM, signal.SIGHUP]


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_ends_what_it_interrupts_in_words(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    told = pytest.raises(Interrupted, match="terminated before it was whole")
    with told as found, terminations_told("it was whole"):
        os.kill(os.getpid(), number)
    assert found.value.exit_code == EXIT_TERMINATED
    assert signal.getsignal(number) is before


@pytest.mark.parametrize("number", SIGNALS)
def test_a_proof_of_a_resume_that_is_terminated_leaves_nothing(
    number: signal.Signals, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLUXTRAIN_RUNS", str(tmp_path))
    seen: list[list[Path]] = []

    def terminated(_: Any) -> int:
        seen.append(list(tmp_path.iterdir()))
        os.kill(os.getpid(), number)
        return 0

    with pytest.raises(Interrupted, match="terminated before the runs were compared"):
        verify_resume(demo_config([]), 4, lambda _: None, terminated)
    assert seen and seen[0] and list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("number", SIGNALS)
def test_an_export_that_is_terminated_leaves_nothing(
    number: signal.Signals, tmp_path: Path
) -> None:
    def write(made: Path) -> None:
        (made / "model.safetensors").write_bytes(b"half")
        os.kill(os.getpid(), number)

    told = pytest.raises(Interrupted, match="terminated before the export was whole")
    with told, terminations_told("the export was whole"):
        save_folder(write, 4, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []
