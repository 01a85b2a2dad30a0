"""A frozen base in fp32 beside adapters: what a user of the command line can do is said once."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import pytest

from fluxtrain.core.guards import wrap_checks
from fluxtrain.events import events as ev
from tests.engine.adapter_folders import exported, make_adapter
from tests.engine.runs import run
from tests.engine.used_models import opened

MakeConfig = Callable[..., Path]
OF_A_LIBRARY = ("prepare_model_for_kbit_training", "torch.bfloat16", "wrap needs")


@pytest.fixture(autouse=True)
def small_weights_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wrap_checks, "LEAST_PACKED", 16)


def warnings_of(config: Path, run_dir: Path, *overrides: str) -> list[str]:
    events = run(config, run_dir, *overrides)
    return [event.text for event in events if isinstance(event, ev.LogWritten)]


def test_a_run_says_once_what_the_setting_is(run_config: MakeConfig, tmp_path: Path) -> None:
    told = warnings_of(run_config(method__name="lora"), tmp_path / "run")
    about = [text for text in told if "float32" in text]
    assert len(about) == 1
    assert "frozen weights in float32: model.dtype=bf" in about[0]
    assert not any(word in text for text in told for word in OF_A_LIBRARY)


def test_an_export_and_a_chat_say_nothing_of_it(
    model_folder: Callable[..., Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    base = model_folder("llama")
    adapter = make_adapter(base, tmp_path / "adapter")
    with caplog.at_level(logging.WARNING):
        exported(adapter)
        with opened(adapter):
            pass
    assert "frozen weights" not in caplog.text
