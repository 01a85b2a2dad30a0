"""The project file and its pins."""

from __future__ import annotations

import ast
import re
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

import fluxtrain

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def sources() -> list[Path]:
    """Everything that is written by hand and not a test."""
    found = [path for folder in ("engine", "fluxtui", "bench") for path in folder_files(folder)]
    return [*found, *ROOT.glob("native/**/*.h"), *ROOT.glob("native/**/*.cpp")]


def folder_files(folder: str) -> Iterator[Path]:
    return (ROOT / folder).rglob("*.py")


def normal(requirement: str) -> str:
    name = re.split(r"[\s<>=!~;\[@]", requirement, maxsplit=1)[0]
    return re.sub(r"[-_.]+", "-", name).lower()


def pins() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    kept = [line.split("#")[0].strip() for line in lines]
    return {normal(line): line for line in kept if line}


def test_the_version_is_the_one_of_pyproject() -> None:
    assert fluxtrain.__version__ == PROJECT["version"]


def test_no_other_file_states_a_version() -> None:
    stated = re.compile(r"""^\s*(__version__|VERSION)\s*(:\s*\w+\s*)?=\s*["']\d+\.\d+""", re.M)
    assert [path for path in sources() if stated.search(path.read_text())] == []


def test_every_package_the_make_targets_install_is_pinned_exactly() -> None:
    extras = PROJECT["optional-dependencies"]
    wanted = [*PROJECT["dependencies"], *extras["dev"], *extras["gpu"], "cmake", "ninja"]
    own = next(one for one in wanted if one.startswith("fluxtrain["))
    wanted.remove(own)
    for extra in own[len("fluxtrain[") : -1].split(","):
        wanted += extras[extra]
    assert {normal(name) for name in wanted} - set(pins()) == set()
    assert all(re.fullmatch(r"[\w.-]+==[\w.!]+", line) for line in pins().values())


def test_torch_is_pinned_without_a_build_so_that_gpu_machines_get_theirs() -> None:
    assert pins()["torch"] == "torch==2.13.0"


@pytest.mark.parametrize("command", ["fluxtrain", "fluxtrain-tui"])
def test_each_command_leads_to_a_function(command: str) -> None:
    module, _, name = PROJECT["scripts"][command].partition(":")
    package, _, rest = module.partition(".")
    root = ROOT / "engine" / "fluxtrain" if package == "fluxtrain" else ROOT / package
    tree = ast.parse((root / f"{rest.replace('.', '/')}.py").read_text())
    assert name in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


def test_continuous_integration_can_run_what_it_calls() -> None:
    for name in ("run", "setup"):
        assert (ROOT / ".ci" / name).stat().st_mode & 0o111, f".ci/{name} is not executable"


def test_the_notes_of_a_release_are_its_part_of_the_changelog() -> None:
    script = str(ROOT / ".ci" / "release_notes")
    told = subprocess.run(
        [script, PROJECT["version"]], capture_output=True, text=True, check=True
    ).stdout
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert "### Added" in told and told.strip() in changelog and "\n## [" not in told
    assert subprocess.run([script, "77.0"], capture_output=True, check=False).returncode == 1
