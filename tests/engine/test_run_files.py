"""What a run says of itself."""

from __future__ import annotations

import json
from importlib import metadata
from pathlib import Path
from typing import Any, NoReturn

import pytest

import fluxtrain
from fluxtrain.config.schema import RunConfig
from fluxtrain.events.run_folder.run_dir import RunDir
from fluxtrain.machine.machine import read_machine
from fluxtrain.train import run_files
from fluxtrain.train.run_files import write_run_file


def versions(run_dir: RunDir) -> dict[str, Any]:
    config = RunConfig.model_validate({"model": {"path": "demo"}, "data": {"path": "demo"}})
    run_dir.path.mkdir(parents=True, exist_ok=True)
    write_run_file(run_dir, config, read_machine())
    found: dict[str, Any] = json.loads(run_dir.run.read_text())["versions"]
    return found


def test_packages_that_were_put_beside_a_program_have_no_version_and_end_no_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unknown(name: str) -> NoReturn:
        raise metadata.PackageNotFoundError(name)

    installed = versions(RunDir(tmp_path / "a"))
    assert installed["torch"] == metadata.version("torch")
    monkeypatch.setattr(metadata, "version", unknown)
    monkeypatch.setattr(run_files, "_version", run_files._version.__wrapped__)  # as at the start
    monkeypatch.delitem(vars(fluxtrain), "__version__", raising=False)
    assert fluxtrain.__version__ == "unknown"
    beside = versions(RunDir(tmp_path / "b"))
    assert beside.keys() == installed.keys()
    assert beside["torch"] == beside["fluxtrain"] == "unknown"
    del fluxtrain.__version__
