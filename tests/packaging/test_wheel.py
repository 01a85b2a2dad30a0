"""The wheel holds all of the project and works away from the checkout."""

from __future__ import annotations

import fcntl
import json
import os
import re
import runpy
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
BUILD = ROOT / "build" / "tested-wheel"


@pytest.fixture(scope="module")
def wheel() -> Path:
    """Built once for all workers, in the cache that they share until they end; of the library only
    what has changed since it was built for an earlier run of these tests."""
    folder = Path(os.environ["XDG_CACHE_HOME"]) / "wheel"
    folder.mkdir(exist_ok=True)
    BUILD.mkdir(parents=True, exist_ok=True)
    with (BUILD / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not any(folder.glob("fluxtrain-*.whl")):
            build(folder)
    (built,) = folder.glob("fluxtrain-*.whl")
    return built


def build(folder: Path) -> None:
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation"]
    command += ["-C", f"build-dir={BUILD}", "-w", str(folder), str(ROOT)]
    subprocess.run(command, check=True)


@pytest.mark.slow
def test_one_wheel_serves_every_python_of_a_platform(wheel: Path) -> None:
    _, _, python, abi, platform = wheel.stem.split("-")
    assert (python, abi) == ("py3", "none")
    assert platform != "any", "it carries a compiled library"


def test_the_wheel_has_every_module_theme_and_the_library(wheel: Path) -> None:
    packed = set(zipfile.ZipFile(wheel).namelist())
    engine, app = ROOT / "engine", ROOT
    modules = {str(path.relative_to(engine)) for path in engine.rglob("*.py")}
    modules |= {str(path.relative_to(app)) for path in (app / "fluxtui").rglob("*.py")}
    themes = {f"fluxtui/themes/{path.name}" for path in (ROOT / "themes").glob("*.toml")}
    library = {"fluxtrain/_native/libflux_native.so", "fluxtrain/py.typed"}
    assert themes
    assert (modules | themes | library) - packed == set()


def test_the_wheel_describes_the_project_with_a_readme_whose_links_lead_somewhere(
    wheel: Path,
) -> None:
    packed = zipfile.ZipFile(wheel)
    (metadata,) = (name for name in packed.namelist() if name.endswith(".dist-info/METADATA"))
    text = packed.read(metadata).decode("utf-8")
    assert "Description-Content-Type: text/markdown" in text
    headings = re.findall(r"^#+ .*", (ROOT / "README.md").read_text(encoding="utf-8"), re.M)
    assert headings and all(heading in text for heading in headings)
    assert re.findall(r"\]\((?!https?:|#)[^)]*\)", text) == []


def test_links_of_the_index_page_lead_to_the_repository_at_the_version() -> None:
    page = runpy.run_path(str(ROOT / "release" / "index_page.py"))["page"]
    text = "![a](s/a.svg) [b](docs/b.md#c) [d](https://d.org) [e](#f)"
    led = "![a](https://r.org/x/raw/v1.2/s/a.svg) [b](https://r.org/x/blob/v1.2/docs/b.md#c)"
    assert page(text, "https://r.org/x/", "1.2") == f"{led} [d](https://d.org) [e](#f)"
    assert page(text, "", "1.2") == " b [d](https://d.org) [e](#f)"


def test_the_app_under_its_own_name_is_the_project_in_the_same_version() -> None:
    files = [ROOT / "pyproject.toml", ROOT / "release" / "tui" / "pyproject.toml"]
    whole, app = (tomllib.loads(path.read_text(encoding="utf-8"))["project"] for path in files)
    made = runpy.run_path(str(ROOT / "release" / "tui" / "of_fluxtrain.py"))
    told = made["dynamic_metadata"]({}, app)
    assert (told["version"], told["dependencies"]) == (
        whole["version"], [f"fluxtrain=={whole['version']}"],
    )  # fmt: skip
    assert set(app["scripts"].items()) <= set(whole["scripts"].items())
    assert app["requires-python"] == whole["requires-python"]


def test_the_container_runs_the_command_as_a_user_without_rights() -> None:
    lines = (ROOT / "release" / "Dockerfile").read_text(encoding="utf-8").splitlines()
    said = [line.split(maxsplit=1) for line in lines if line and line[0].isupper()]
    order = [word for word, _ in said]
    told = dict(said)
    assert told["FROM"].endswith("-slim") and told["USER"] not in ("0", "root")
    assert order.index("USER") < order.index("ENTRYPOINT") and order[-2:] == ["ENTRYPOINT", "CMD"]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert json.loads(told["ENTRYPOINT"])[0] in project["scripts"]


def test_the_wheel_works_without_the_checkout(wheel: Path, tmp_path: Path) -> None:
    zipfile.ZipFile(wheel).extractall(tmp_path)
    # -S and a path of our own: the editable install must not step in.
    code = (
        f"import sys; sys.path[:0] = [{str(tmp_path)!r}]; "
        "import fluxtrain._native as native; "
        "print(native.library_path()); print(native.isa())"
    )
    finished = subprocess.run(
        [sys.executable, "-S", "-P", "-c", code],
        env={"PATH": os.environ["PATH"]},
        cwd=tmp_path,
        check=True,
        capture_output=True,
        text=True,
    )
    library, isa = finished.stdout.split()
    assert Path(library).is_relative_to(tmp_path)
    assert isa in ("scalar", "avx2", "avx512")
