"""A kill while the model is saved leaves no second model behind once the run went on."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.engine.runs import run


class Killed(BaseException):
    """What a kill looks like to a test: nothing is tidied after it."""


@pytest.mark.parametrize("when", ["before it is in place", "between the two", "as it is in place"])
@pytest.mark.thinned(1)
def test_what_a_killed_save_left_is_gone_after_the_resume(
    when: str, run_config: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, run_dir = run_config(), tmp_path / "run"
    run(config, run_dir)
    rename, rmtree, moved = Path.rename, shutil.rmtree, 0

    def removed(path: Path, **how: Any) -> None:
        if Path(path).name.startswith(".model-old-"):
            raise Killed
        rmtree(path, **how)

    def renamed(path: Path, target: Path) -> Path:
        nonlocal moved
        if path.parent == run_dir and path.name.removeprefix(".").startswith("model"):
            moved += 1
            if moved == (1 if when == "before it is in place" else 2):
                raise Killed
        return rename(path, target)

    with monkeypatch.context() as patch, pytest.raises(Killed):
        if when == "as it is in place":
            patch.setattr(shutil, "rmtree", removed)
        else:
            patch.setattr(Path, "rename", renamed)
            patch.setattr(shutil, "rmtree", lambda *_, **__: None)
        run(config, run_dir, resume=str(run_dir))
    left = list(run_dir.glob(".model-*"))
    assert left, "the kill left something"
    shutil.copytree(run_dir / "checkpoints", run_dir / ".model-kept")  # of somebody else
    theirs = run_dir / ".model-original"
    theirs.mkdir(mode=0o755)
    (theirs / "model.safetensors").write_bytes(b"theirs")
    run(config, run_dir, resume=str(run_dir))
    assert {path.name for path in run_dir.glob(".model-*")} == {".model-kept", theirs.name}
    assert (theirs / "model.safetensors").read_bytes() == b"theirs"
    assert (run_dir / "model" / "model.safetensors").exists()
