"""A temporary folder or a cache that is full or only read is told with what moves it."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

import pytest

from fluxtrain.errors import BadInput, FluxTrainError, NoSpace
from fluxtrain.files.atomic import check_space, storage_error
from fluxtrain.files.temporary import moved_by, temporary_folder, written_in
from fluxtrain.machine.failures import as_told
from fluxtrain.models.export import save_folder

FULL = OSError(errno.ENOSPC, "No space left on device")


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.setattr(tempfile, "tempdir", None)
    return folder


@pytest.fixture
def nearly_full(temporary: Path) -> Iterator[Path]:
    """A temporary folder on a disk of its own that has room for 8 KiB."""
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(temporary)]
    if os.geteuid() or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("no file system can be mounted here")
    (temporary / "filler").write_bytes(bytes((1 << 20) - (8 << 10)))
    yield temporary
    subprocess.run(["umount", str(temporary)], check=True)


def test_each_folder_that_a_variable_moves_is_told_with_it(
    temporary: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable in ("HF_HOME", "HF_HUB_CACHE", "HF_MODULES_CACHE", "TRITON_CACHE_DIR"):
        monkeypatch.setenv(variable, str(tmp_path / variable))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for variable in ("HF_HOME", "HF_HUB_CACHE", "HF_MODULES_CACHE", "TRITON_CACHE_DIR"):
        assert f"set {variable} " in str(moved_by(tmp_path / variable / "one" / "file"))
    assert "set XDG_CACHE_HOME " in str(moved_by(tmp_path / "cache" / "fluxtrain" / "file"))
    assert "set TMPDIR " in str(moved_by(temporary / ".fluxtrain-dry-run-ab12cd_9" / "run"))
    for other in (temporary / "run", temporary / "fluxtrain-runs" / "a", tmp_path / "cache" / "it"):
        assert moved_by(other) is None, "a run that a user put there is moved by --run-dir"


@pytest.mark.parametrize(
    ("number", "kind"), [(errno.ENOSPC, NoSpace), (errno.EROFS, BadInput), (errno.EACCES, BadInput)]
)
def test_a_library_that_cannot_write_its_cache_is_told_with_its_variable(
    number: int, kind: type[FluxTrainError], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    told = as_told(OSError(number, os.strerror(number), str(tmp_path / "kernel" / "x.cubin")))
    assert type(told) is kind
    assert "set TRITON_CACHE_DIR to a folder on another disk" in str(told)
    assert "--run-dir" not in str(told)


def test_a_run_in_the_temporary_folder_is_not_told_to_take_another_run_dir(temporary: Path) -> None:
    with temporary_folder("dry-run", "records") as folder:
        assert folder.parent == temporary
        for told in (storage_error(folder / "run", FULL), storage_error(folder, OSError(30, "ro"))):
            assert "set TMPDIR" in str(told) and "--run-dir" not in str(told)
        with pytest.raises(NoSpace, match="and .* is free: free some space, or set TMPDIR"):
            check_space(folder, 1 << 60)
        with pytest.raises(NoSpace, match="is free: make room, or set TMPDIR"):
            save_folder(lambda _: None, 1 << 60, folder / "demo")
    assert not list(temporary.iterdir())
    assert "--run-dir" in str(storage_error(temporary / "run", FULL))


def test_what_a_killed_process_left_goes_with_the_next_folder(temporary: Path) -> None:
    dies = "import os; from fluxtrain.files.temporary import temporary_folder as t\n"
    dies += "with t('rank', 'records') as made: (made / 'run').mkdir(); os.kill(os.getpid(), 9)"
    assert subprocess.run([sys.executable, "-c", dies], check=False).returncode == -9
    (left,) = temporary.iterdir()
    with temporary_folder("dry-run", "records") as folder, temporary_folder("rank", "more"):
        assert not left.exists() and folder.exists()


@pytest.mark.parametrize("option", ["--run-dir", "--folder", "--start"])
@pytest.mark.parametrize("code", [errno.EACCES, errno.ENOSPC])
def test_the_option_that_moves_a_file_is_told(option: str, code: int) -> None:
    error = storage_error(Path("/elsewhere/x"), OSError(code, os.strerror(code)), option=option)
    assert f"with {option}" in str(error)
    assert ("FLUXTRAIN_RUNS" in str(error)) == (option == "--run-dir" and code == errno.EACCES)


def test_a_temporary_folder_that_cannot_be_made_is_told(
    temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuses(*_: object, **__: object) -> NoReturn:
        raise FULL

    monkeypatch.setattr(tempfile, "mkdtemp", refuses)
    with (
        pytest.raises(NoSpace, match=rf"left for records in {temporary} .* free\): .* set TMPDIR"),
        temporary_folder("dry-run", "records"),
    ):
        pass
    nowhere = FileNotFoundError(2, "No usable temporary directory found in ['/tmp']")

    def finds_none(*_: object) -> NoReturn:
        raise nowhere

    monkeypatch.setattr(tempfile, "gettempdir", finds_none)
    monkeypatch.setattr(tempfile, "mkdtemp", finds_none)
    with (
        pytest.raises(BadInput, match="records cannot be written: No usable .* set TMPDIR"),
        temporary_folder("dry-run", "records"),
    ):
        pass


def test_what_a_library_cannot_write_there_is_told(nearly_full: Path) -> None:
    def written(by: str, file: Path) -> None:
        if by == "python":
            file.write_bytes(bytes(1 << 16))
        raise RuntimeError("No space left on device (os error 28)")  # as libraries in Rust do

    for by in ("python", "rust"):
        with (
            temporary_folder("trial", "files") as folder,
            pytest.raises(NoSpace, match=rf"for files in {nearly_full} \(No space.* set TMPDIR"),
            written_in(folder, "files"),
        ):
            written(by, folder / "file")
    with (
        temporary_folder("trial", "files") as folder,
        pytest.raises(FileNotFoundError),
        written_in(folder, "files"),
    ):
        open(nearly_full / "elsewhere")  # noqa: SIM115 - it is not there
