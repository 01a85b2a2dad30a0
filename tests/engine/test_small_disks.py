"""Trainers of an unprivileged user on a small disk that fills up, and under kills at any time: what
ends them has its code, nothing half is left, and the model is that of a run without any of it."""

from __future__ import annotations

import hashlib
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

NOBODY = 65534
LIMIT_S = 180.0
SETTINGS = ("--demo", "--steps", "12", "--set", "train.checkpoint_every=2")

Start = Callable[..., "subprocess.Popen[bytes]"]


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 200 MiB of its own that anybody may write."""
    place = tmp_path / "disk"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=200m,mode=0777", "tmpfs", str(place)]
    if os.geteuid() or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("no file system can be mounted here")
    yield place
    subprocess.run(["umount", str(place)], check=True)


@pytest.fixture
def start(disk: Path) -> Start:
    """`start(*arguments)`: a trainer as another user, where that one can read the packages."""
    user: dict[str, Any] = {"user": NOBODY, "group": NOBODY, "extra_groups": []}
    try:
        subprocess.run([sys.executable, "-c", "import torch"], **user, check=True, timeout=60)
    except (OSError, subprocess.CalledProcessError):
        user = {}
    places = {"HOME": str(disk), "XDG_CACHE_HOME": str(disk / "cache"), "OMP_NUM_THREADS": "1"}

    def run(*arguments: object) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-P", "-m", "fluxtrain", "train", *map(str, arguments)]
        return subprocess.Popen(
            command, **user, cwd=disk, env={**os.environ, **places}, stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
        )  # fmt: skip

    return run


def ended(process: subprocess.Popen[bytes]) -> tuple[int, str]:
    _, words = process.communicate(timeout=LIMIT_S)
    return process.returncode, words.decode()


def model_of(run: Path) -> str:
    assert json.loads((run / "result.json").read_text())["exit_code"] == 0
    return hashlib.sha256((run / "model" / "model.safetensors").read_bytes()).hexdigest()


@pytest.fixture
def undisturbed(start: Start, disk: Path) -> str:
    """The model of a run that nothing happens to."""
    code, words = ended(start(*SETTINGS, "--run-dir", disk / "sound"))
    assert code == 0, words
    found = model_of(disk / "sound")
    subprocess.run(["rm", "-r", str(disk / "sound")], check=True)
    return found


@pytest.mark.slow
def test_a_disk_that_fills_up_in_a_run_loses_nothing(
    start: Start, disk: Path, undisturbed: str
) -> None:
    run = disk / "run"
    process = start(*SETTINGS, "--run-dir", run, "--disk-wait", 0)
    until_s = time.monotonic() + LIMIT_S
    while not (run / "checkpoints" / "step-00000002").exists():
        assert process.poll() is None and time.monotonic() < until_s
        time.sleep(0.01)
    with (disk / "filler").open("wb", buffering=0) as file, pytest.raises(OSError):
        while True:
            file.write(bytes(1 << 20))
    code, words = ended(process)
    assert code == 5 and "free some" in words and "Traceback" not in words, words
    assert not list((run / "checkpoints").glob(".writing-*"))
    (disk / "filler").unlink()
    code, words = ended(start("--resume", run))
    assert code == 0, words
    assert model_of(run) == undisturbed


@pytest.mark.slow
def test_kills_while_it_loads_trains_and_saves_lose_nothing(
    start: Start, disk: Path, undisturbed: str
) -> None:
    run, drawn = disk / "run", random.Random()
    for _ in range(8):
        process = start(*SETTINGS, "--run-dir", run, "--resume", "auto")
        try:
            process.wait(drawn.uniform(0.3, 9.0))
        except subprocess.TimeoutExpired:
            process.kill()
        code, words = ended(process)
        assert code in (0, -9), words
    code, words = ended(start(*SETTINGS, "--run-dir", run, "--resume", "auto"))
    assert code == 0, words
    assert model_of(run) == undisturbed
