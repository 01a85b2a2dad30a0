"""The check for circles of modules and folders, and for rooms that say what they are for."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / ".ci" / "check_imports.py"


@pytest.fixture(scope="module")
def check() -> ModuleType:
    spec = importlib.util.spec_from_file_location("check_imports", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def package(folder: Path, **texts: str) -> Path:
    """A package `made` with modules of these texts; `in__a` is the module `in.a`."""
    root = folder / "made"
    for name, text in {"__init__": "", **texts}.items():
        parts = name.split("__") if name != "__init__" else [name]
        path = root.joinpath(*parts).with_suffix(".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.parent != root:
            (path.parent / "__init__.py").write_text('"""A room."""')
        path.write_text(text)
    return root


@pytest.mark.parametrize(
    "back",
    [
        "import made.a",
        "from made.a import x",
        "from made import a",
        "from . import a",
        "from .a import x",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from made.a import X",
        "def late():\n    from made.a import x",
    ],
)
def test_two_modules_that_import_each_other_are_found(
    tmp_path: Path, check: ModuleType, back: str
) -> None:
    root = package(tmp_path, a="from made.b import y", b=back)
    [said] = check.problems(root)
    assert said.startswith("2 modules import each other, such as made.a -> made.b -> made.a")


def test_imports_that_go_one_way_and_out_of_the_package_are_no_circle(
    tmp_path: Path, check: ModuleType
) -> None:
    low, high = "import os, textual", "from made import low\nfrom ..b import z"
    root = package(tmp_path, low=low, sub__high=high, b="from made.low import x")
    assert check.problems(root) == []


def test_folders_that_import_each_other_are_found_where_no_modules_do(
    tmp_path: Path, check: ModuleType
) -> None:
    texts = {"one__low": "", "one__high": "import made.two.x", "two__x": "import made.one.low"}
    [said] = check.problems(package(tmp_path, **texts))
    assert said.startswith("2 parts of made import each other, such as made.one -> made.two")


def test_a_package_has_few_rooms_and_each_says_what_it_is_for(
    tmp_path: Path, check: ModuleType
) -> None:
    root = package(tmp_path, _private__x="", **{f"room{n}__x": "" for n in range(check.MOST_ROOMS)})
    assert check.problems(root) == []
    (root / "room0" / "__init__.py").write_text("")
    package(tmp_path, more__x="")
    assert check.problems(root) == [
        f"made has {check.MOST_ROOMS + 1} rooms, more than {check.MOST_ROOMS}: "
        "a stranger ranks few",
        "room0/__init__.py does not say what the room is for",
    ]


def test_the_command_fails_where_something_is_wrong_and_without_a_folder(tmp_path: Path) -> None:
    root = package(tmp_path, a="import made.b", b="import made.a")
    for folders, code in (([root], 1), ([], 1), ([ROOT / "fluxtui"], 0)):
        command: list[Any] = [sys.executable, SCRIPT, *folders]
        told = subprocess.run(command, check=False, capture_output=True, text=True)
        assert told.returncode == code, told.stdout
        assert ("import each other" in told.stdout) == (folders == [root])
