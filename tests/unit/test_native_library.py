"""The binding: found in either folder, loaded late, refused clearly when missing or old."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import fluxtrain._native as native
from fluxtrain.errors import BadInput, FluxTrainError


@pytest.fixture
def forgotten_library() -> object:
    """The loaded library is forgotten before and after, so that a test can look for another."""
    native._library.cache_clear()
    yield
    native._library.cache_clear()


def run_python(code: str, **environment: str) -> str:
    finished = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=True,
    )
    return finished.stdout.strip()


def test_a_missing_library_names_the_cure_and_where_it_was_sought(
    forgotten_library: object, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(native, "__path__", [str(tmp_path)])
    with pytest.raises(FluxTrainError, match="run `make native`") as raised:
        native.kernel("adamw")
    assert str(tmp_path) in str(raised.value)


def test_a_broken_library_names_the_cure(
    forgotten_library: object, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / native.LIBRARY).write_bytes(b"not a library")
    monkeypatch.setattr(native, "__path__", [str(tmp_path)])
    with pytest.raises(FluxTrainError, match="does not load .* run `make native`"):
        native.isa()


def test_a_library_of_another_version_is_refused(
    forgotten_library: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = native.ABI_VERSION
    monkeypatch.setattr(native, "ABI_VERSION", 999)
    with pytest.raises(FluxTrainError, match=f"speaks version {ours} .* speaks 999"):
        native.isa()


def test_importing_the_binding_loads_no_library() -> None:
    code = (
        "import fluxtrain._native; "
        "print(any('libflux_native' in line for line in open('/proc/self/maps')))"
    )
    assert run_python(code) == "False"


@pytest.mark.parametrize("wish", native.ISA_NAMES)
def test_the_environment_can_only_lower_the_instruction_set(wish: str) -> None:
    code = "import fluxtrain._native as n; print(n.isa(), n.set_isa('avx512'))"
    best = run_python(code, FLUXTRAIN_ISA="").split()[0]
    used, raised_to = run_python(code, FLUXTRAIN_ISA=wish).split()
    rank = native.ISA_NAMES.index
    assert rank(used) == min(rank(wish), rank(best))
    assert used == raised_to, "a process that asked for less must not be raised again"


@pytest.mark.parametrize("wish", ["mmx", "AVX2", "avx512 "])
def test_an_unknown_wish_is_refused_with_the_known_ones(
    wish: str, forgotten_library: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(native.ISA_VARIABLE, wish)
    with pytest.raises(BadInput, match="use scalar, avx2 or avx512, or leave it out") as raised:
        native.isa()
    assert repr(wish) in str(raised.value)
