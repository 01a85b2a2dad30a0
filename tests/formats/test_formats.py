"""Runs that released versions made are listed, shown, resumed and exported by this one.

docs/formats.md is the promise; make_runs.py adds a version's runs when it is released.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from fluxtrain.config.schema import RunConfig, settings
from fluxtrain.errors import BadInput, TooNew
from fluxtrain.events.events import SCHEMA_MAJOR
from fluxtrain.events.journal import read_events
from fluxtrain.events.run_folder.run_dir import RunDir, list_runs
from fluxtrain.train.checkpoint.checkpoint import FORMAT
from fluxtrain.train.checkpoint.newest import newest_resumable
from fluxtrain.train.checkpoint.recovery import stored_config
from fluxtui.state.run import FoldedRun
from tests.engine.adapter_folders import exported

HERE = Path(__file__).resolve().parent
LONG_AGO_S = time.time() - 3600
VERSIONS = sorted(path.name for path in HERE.iterdir() if re.fullmatch(r"\d+\.\d+\.\d+", path.name))
CHECKPOINT = Path("full", "checkpoints", "step-00000002")
Released = Callable[[str], Path]


@pytest.fixture
def released(tmp_path: Path) -> Released:
    """A copy of a version's runs, with the paths of the copy in it."""

    def copied(version: str) -> Path:
        folder = tmp_path / version
        shutil.copytree(HERE / version, folder)
        for path in folder.rglob("*"):
            if path.suffix in (".json", ".ndjson"):
                text = path.read_text(encoding="utf-8")
                if "@HERE@" in text:
                    path.write_text(text.replace("@HERE@", str(folder)), encoding="utf-8")
            os.utime(path, (LONG_AGO_S, LONG_AGO_S))  # a run of another host is dead when silent
        return folder

    return copied


def losses(run: Path) -> dict[int, float]:
    lines = (run / "events.ndjson").read_text(encoding="utf-8").splitlines()
    told = [json.loads(line) for line in lines]
    return {one["step"]: one["loss"] for one in told if one["event"] == "step"}


@pytest.mark.parametrize("version", VERSIONS)
def test_runs_of_each_version_are_listed_and_shown(version: str, released: Released) -> None:
    folder = released(version)
    states = {run.run_id: run.state for run in list_runs(folder)}
    assert states == {"full": "dead", "lora": "finished"}
    for name in states:
        state = FoldedRun().after_all(read_events(folder / name / "events.ndjson"))
        assert state.hello is not None and state.hello.total_steps == 6 and state.step is not None
        stored = stored_config(RunDir(folder / name))  # every setting is still known
        assert stored.data.path == str(folder / "text.txt")


@pytest.mark.slow  # make test-formats
@pytest.mark.parametrize("version", VERSIONS)
def test_a_killed_run_of_each_version_goes_on_to_the_same_losses(
    version: str, released: Released
) -> None:
    folder = released(version)
    done = subprocess.run(
        [sys.executable, "-m", "fluxtrain", "train", "--resume", str(folder / "full")],
        capture_output=True, text=True, check=False, timeout=250,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    expected = json.loads((folder / "losses.json").read_text())
    found = losses(folder / "full")
    # another processor or torch rounds otherwise
    assert [found[step] for step in sorted(found)][2:] == pytest.approx(expected[2:], rel=1e-3)


@pytest.mark.parametrize("version", VERSIONS)
def test_an_adapter_of_each_version_is_merged(version: str, released: Released) -> None:
    folder = released(version)
    answer = exported(folder / "lora", merge=True, device="cpu")
    assert answer.changed and answer.logits is not None  # compared with base and adapter


def test_a_later_checkpoint_journal_or_configuration_names_the_version_that_reads_it(
    released: Released,
) -> None:
    folder = released(VERSIONS[-1])
    cure = r"9\.1\.0.*pip install 'fluxtrain>=9\.1\.0'"
    manifest = folder / CHECKPOINT / "manifest.json"
    held = {**json.loads(manifest.read_text()), "format": FORMAT + 1, "written_by": "9.1.0"}
    del held["sha256"]
    text = json.dumps(held, sort_keys=True, separators=(",", ":"))
    seal = hashlib.sha256(text.encode()).hexdigest()
    manifest.write_text(json.dumps({**held, "sha256": seal}))
    with pytest.raises(TooNew, match=cure):  # a resume skips what is damaged, and not this one
        newest_resumable(folder / CHECKPOINT.parent, lambda _: None)

    run = folder / "full" / "run.json"
    run.write_text(
        run.read_text()
        .replace('"fluxtrain": "', '"fluxtrain": "9.1.0", "was": "')
        .replace('"trust_remote_code"', '"of_later": 1, "trust_remote_code"', 1)
    )
    with pytest.raises(BadInput, match=f"model.of_later.*{cure}"):
        stored_config(RunDir(folder / "full"))

    journal = folder / "lora" / "events.ndjson"
    first, rest = journal.read_text().split("\n", 1)
    hello = {**json.loads(first), "schema": f"{SCHEMA_MAJOR + 1}.0", "version": "9.1.0"}
    journal.write_text(f"{json.dumps(hello)}\n{rest}")
    with pytest.raises(TooNew, match=cure):
        list(read_events(journal))


def test_no_setting_of_a_released_version_is_gone() -> None:
    known = {setting.key for setting in settings(RunConfig())}
    for version in VERSIONS:
        stored = json.loads((HERE / version / "full" / "run.json").read_text())["config"]
        keys = {f"{section}.{key}" for section, held in stored.items() for key in held}
        assert keys <= known, version
