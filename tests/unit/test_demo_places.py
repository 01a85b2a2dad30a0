"""The demo's files have a place of this user; a full disk is told."""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
from pathlib import Path
from typing import NoReturn

import pytest

from fluxtrain.data import demo
from fluxtrain.errors import BadInput, NoSpace
from fluxtrain.files.folders import unfinished_folder


@pytest.fixture(autouse=True)
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache and a temporary folder of their own, and a demo that is made at once."""
    (tmp_path / "temporary").mkdir()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("TMPDIR", str(tmp_path / "temporary"))
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setattr(demo, "docstrings", lambda: (f"docstring {at}" for at in range(1000)))
    monkeypatch.setattr(demo, "train_tokenizer", tokenizer_files)


def tokenizer_files(_: list[str], folder: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_text("{}")


def fill(monkeypatch: pytest.MonkeyPatch, *full: Path) -> None:
    """Let no folder be made in these places, as on a disk that is full."""

    def made(parent: Path, prefix: str) -> object:
        if any(parent.is_relative_to(one) for one in full):
            raise OSError(errno.ENOSPC, "No space left on device")
        return unfinished_folder(parent, prefix)

    monkeypatch.setattr(demo, "unfinished_folder", made)


def test_a_full_disk_is_told_with_the_setting_that_names_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(monkeypatch, tmp_path)
    with pytest.raises(NoSpace, match=r"3.00 MiB needed, .* or set XDG_CACHE_HOME"):
        demo.demo_files()
    shutil.rmtree(tmp_path / "cache")
    (tmp_path / "cache").write_text("a file")
    with pytest.raises(NoSpace, match=r"free\): make room, or set TMPDIR"):
        demo.demo_files()


def test_a_disk_without_room_is_known_before_the_demo_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def makes() -> NoReturn:
        raise AssertionError("nothing is made")

    monkeypatch.setattr(demo, "_corpus", makes)
    monkeypatch.setattr(demo, "SIZE_BYTES", 1 << 60)
    with pytest.raises(NoSpace, match=" needed, .* free"):
        demo.demo_files()


def test_files_that_somebody_else_left_in_the_temporary_folder_are_not_taken(
    tmp_path: Path,
) -> None:
    (tmp_path / "cache").write_text("a file")
    other = tmp_path / "other"
    other.mkdir()
    (tmp_path / "temporary" / f"fluxtrain-{os.getuid()}").symlink_to(other)
    with pytest.raises(BadInput, match="is not a folder of yours: remove it, or set XDG_CACHE"):
        demo.demo_files()
    assert not list(other.iterdir())


def test_no_place_at_all_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses() -> NoReturn:
        raise FileNotFoundError(2, "No usable temporary directory found in ['/tmp']")

    (tmp_path / "cache").write_text("a file")
    monkeypatch.setattr(tempfile, "gettempdir", refuses)
    with pytest.raises(BadInput, match="the demo's text cannot be written: No usable .* TMPDIR"):
        demo.demo_files()
