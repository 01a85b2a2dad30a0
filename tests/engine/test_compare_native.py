"""Builds of the native library are compared in turn."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from fluxtrain import _native

BENCH = Path(__file__).parents[2] / "bench"


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(BENCH / "compare_native.py"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)


def test_two_builds_run_the_same_kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old = tmp_path / "old.so"
    shutil.copy(_native.library_path(), old)
    monkeypatch.setattr("sys.path", [*sys.path, str(BENCH)])
    import compare_native

    monkeypatch.setattr(compare_native, "LEAST_S", 0.0)
    monkeypatch.setattr(compare_native.native, "_library", compare_native.native._library)
    builds = [
        compare_native.Build(path.stem, compare_native.native.load(path))
        for path in (old, _native.library_path())
    ]
    assert builds[0].library._handle != builds[1].library._handle
    arena = compare_native.arena_of(5000)
    rows = compare_native.chosen(compare_native.ROWS, ["8-bit"])
    assert [row.name for row in rows] == ["stream, 8-bit states", "adamw, 8-bit states"]
    compare_native.compare(builds, arena, rows, 1)
    lines = compare_native.table(builds, rows, arena.n, 1)
    assert len(lines) == 4
    assert all(len(taken) == 3 for build in builds for taken in build.seconds.values())
    assert lines[2].split()[:5] == ["1", "adamw,", "8-bit", "states", "old"]
    assert lines[2].split()[6] == "1.000"  # times itself
    assert arena.tensors["m8"].unique().numel() > 1  # they were updated


def test_builds_of_one_name_are_told_apart_by_their_folders(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("sys.path", [*sys.path, str(BENCH)])
    from compare_native import name_of

    same = [Path(f"/builds/{which}/native/libflux_native.so") for which in ("old", "new")]
    assert [name_of(path, same) for path in same] == ["old", "new"]
    other = [Path("/builds/old.so"), Path("/builds/new.so")]
    assert [name_of(path, other) for path in other] == ["old", "new"]


def test_what_is_no_library_or_kernel_is_refused(tmp_path: Path) -> None:
    broken = tmp_path / "broken.so"
    broken.write_text("no library")
    refused = run(str(broken))
    assert refused.returncode == 2 and "broken.so does not load" in refused.stderr
    twice = run(str(_native.library_path()), str(_native.library_path()))
    assert twice.returncode == 2 and "twice" in twice.stderr
    unknown = run(str(_native.library_path()), "--million", "0.01", "--kernels", "9-bit")
    assert unknown.returncode == 2 and "adamw, 8-bit states" in unknown.stderr
