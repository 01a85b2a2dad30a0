"""Folders whose maker was killed are cleared, those of the living and of others never."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from fluxtrain.data import demo
from fluxtrain.files.folders import MARK, finish, remove_left, unfinished_folder
from fluxtrain.models.export import save_folder

PROGRAM = """
import sys, time
from pathlib import Path
from fluxtrain.files.folders import unfinished_folder
with unfinished_folder(Path(sys.argv[1]), sys.argv[2]) as made:
    (made / "model.safetensors").write_bytes(b"half")
    (made / "run").mkdir()
    (made / "run" / "pid").write_text("")
    print(made, flush=True)
    time.sleep(60)
"""


@contextmanager
def maker(parent: Path, prefix: str = ".out-") -> Iterator[tuple[Path, Callable[[], None]]]:
    """A process that makes a folder; the folder, and how to kill the process."""
    command = [sys.executable, "-c", PROGRAM, str(parent), prefix]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        folder = Path(process.stdout.readline().strip())

        def killed() -> None:
            process.send_signal(signal.SIGKILL)
            process.wait()

        try:
            yield folder, killed
        finally:
            killed()


def save(parent: Path) -> None:
    def write(made: Path) -> None:
        (made / "a.txt").write_text("b")

    save_folder(write, 1, parent / "out")


def make_demo(parent: Path) -> None:
    demo._make_anew(parent / "demo")


@pytest.mark.parametrize("uses", [save, make_demo])
def test_the_next_one_clears_what_a_killed_process_left_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, uses: Callable[[Path], None]
) -> None:
    monkeypatch.setenv("FLUXTRAIN_RUNS", str(tmp_path))
    monkeypatch.setattr(demo, "_corpus", lambda: ["a text of a few words"] * 9)
    theirs = tmp_path / ".out-original"
    theirs.mkdir(mode=0o700)
    (theirs / "model.safetensors").write_bytes(b"theirs")
    with maker(tmp_path, ".verify-resume-") as (living, _), maker(tmp_path) as (left, killed):
        uses(tmp_path)
        assert living.is_dir() and left.is_dir(), "both are alive"
        killed()
        shutil.rmtree(tmp_path / "demo", ignore_errors=True)
        uses(tmp_path)
        assert not left.exists()
        assert (living / "model.safetensors").exists() and (living / MARK).exists()
    assert (theirs / "model.safetensors").read_bytes() == b"theirs"
    remove_left(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} <= {theirs.name, "out", "demo"}


def test_a_folder_that_gets_its_name_holds_no_mark_and_stays(tmp_path: Path) -> None:
    save(tmp_path)
    assert os.listdir(tmp_path) == ["out"] and os.listdir(tmp_path / "out") == ["a.txt"]
    with unfinished_folder(tmp_path, ".x-") as made:
        finish(made)
        made.rename(tmp_path / ".x-abcdefgh")
    remove_left(tmp_path)
    assert (tmp_path / ".x-abcdefgh").is_dir()


@pytest.mark.parametrize("ends", ["in order", "by an error"])
def test_an_unfinished_folder_goes_with_its_context(tmp_path: Path, ends: str) -> None:
    def work() -> None:
        with unfinished_folder(tmp_path, ".x-") as made:
            (made / "inner").mkdir()
            if ends == "by an error":
                raise KeyError(ends)

    if ends == "by an error":
        with pytest.raises(KeyError):
            work()
    else:
        work()
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("what", ["link to a folder", "linked mark", "another user's"])
def test_what_nobody_here_made_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    real = tmp_path / "real"
    real.mkdir()
    (real / MARK).write_text("")
    place = tmp_path / ".out-abcdefgh"
    if what == "link to a folder":
        place.symlink_to(real)
    else:
        place.mkdir()
        if what == "linked mark":
            (place / MARK).symlink_to(real / MARK)
        else:
            (place / MARK).write_text("")
            monkeypatch.setattr(os, "geteuid", lambda: 12345)
    remove_left(tmp_path)
    assert place.is_dir() and (real / MARK).exists()
