"""The documents speak of what is there."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import yaml

from fluxtrain import errors
from fluxtrain.commands.completion import KEYS

ROOT = Path(__file__).resolve().parents[2]
PAGES = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")]
ROOTS = ("engine/", "fluxtui/", "native/", "tests/", "docs/", "bench/", "themes/", "screenshots/")
PATH = re.compile(r"`((?:\.ci|[\w.-]+)/[\w./-]+|[\w-]+\.(?:md|toml|txt)|Makefile|themes)`")
LINK = re.compile(r"\]\((?!https?:|#)([^)#]+)")
ANCHOR = re.compile(r"\]\((?!https?:)([^)#]*)#([^)]+)\)")
BENCH = re.compile(r"python (bench/\w+\.py)([^\n`|]*)")


def named_paths(page: Path) -> set[str]:
    return set(PATH.findall(page.read_text(encoding="utf-8")))


def tracked(path: str) -> bool:
    return (ROOT / path).exists()


def test_every_path_that_the_architecture_names_exists() -> None:
    paths = {path for path in named_paths(ROOT / "ARCHITECTURE.md") if path.startswith(ROOTS)}
    assert len(paths) > 30, "the expression still finds the paths"
    assert {path for path in paths if not tracked(path)} == set()


def test_the_architecture_is_two_hundred_lines_at_most() -> None:
    assert len((ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8").splitlines()) <= 200


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_and_picture_inside_the_project_exists(page: Path) -> None:
    targets = LINK.findall(page.read_text(encoding="utf-8"))
    assert [target for target in targets if not (page.parent / target).exists()] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_into_a_page_finds_its_heading(page: Path) -> None:
    for target, anchor in ANCHOR.findall(page.read_text(encoding="utf-8")):
        text = (page.parent / target if target else page).read_text(encoding="utf-8")
        headings = re.findall(r"^#+ (.*)$", text, re.M)
        anchors = {re.sub(r"[^\w -]", "", line.lower()).replace(" ", "-") for line in headings}
        assert anchor in anchors, target


def test_every_flag_of_a_benchmark_that_a_document_names_exists() -> None:
    found = [call for page in PAGES for call in BENCH.findall(page.read_text(encoding="utf-8"))]
    assert len(found) > 10, "the expression still finds the calls"
    for script, rest in found:
        source = (ROOT / script).read_text(encoding="utf-8")
        for flag in re.findall(r"--[a-z-]+", rest):
            assert f'"{flag}"' in source, f"{script} {flag}"


def test_the_names_in_the_architecture_are_names_of_the_code() -> None:
    text = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
    sources = "\n".join(path.read_text() for path in (ROOT / "engine").rglob("*.py"))
    for owner, name in re.findall(r"`([A-Z]\w+)\.(_?\w+)`", text):
        assert f"class {owner}" in sources, owner
        assert f"def {name}(" in sources, f"{owner}.{name}"


def test_every_exit_code_is_documented() -> None:
    text = (ROOT / "docs" / "exit-codes.md").read_text(encoding="utf-8")
    documented = {int(code) for code in re.findall(r"^\| (\d+) \|", text, re.M)}
    defined = {value for name, value in vars(errors).items() if name.startswith("EXIT_")}
    assert documented == defined


def writer() -> ModuleType:
    path = ROOT / "docs" / "write_configuration.py"
    spec = importlib.util.spec_from_file_location("write_configuration", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_and_the_completed_keys_of_the_configuration_are_current() -> None:
    written = (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8")
    assert written == writer().page(), "run: python docs/write_configuration.py"
    assert KEYS.read_text(encoding="utf-8") == writer().keys()


def commands_of(page: Path) -> list[str]:
    """What a page's blocks of code say, without comments."""
    blocks = re.findall(r"^```\w*\n(.*?)^```", page.read_text(encoding="utf-8"), re.M | re.S)
    lines = (
        re.split(r"(?:^|\s)#", line)[0].rstrip() for block in blocks for line in block.split("\n")
    )
    return [line for line in lines if line]


@pytest.mark.parametrize("language", ["zh-CN", "zh-TW"])
def test_a_translated_readme_has_the_commands_links_and_numbers_of_the_english_one(
    language: str,
) -> None:
    english, translated = ROOT / "README.md", ROOT / f"README.{language}.md"
    assert commands_of(translated) == commands_of(english)
    texts = [page.read_text(encoding="utf-8") for page in (english, translated)]
    links = [set(re.findall(r"\]\(([^)]+)\)", text)) for text in texts]
    others = {"README.md", "README.zh-CN.md", "README.zh-TW.md"}
    assert links[1] - others <= links[0]
    rows = [re.findall(r"^\| [\d.]+ B.*$", text, re.M) for text in texts]
    numbers = [[re.findall(r"[\d.]+", row) for row in one] for one in rows]
    assert numbers[0] == numbers[1] and numbers[0]


def test_every_make_target_that_a_document_names_exists() -> None:
    targets = set(re.findall(r"^([a-z0-9-]+):", (ROOT / "Makefile").read_text(), re.M))
    for page in [*PAGES, *ROOT.glob(".github/workflows/*.yml")]:
        text = page.read_text(encoding="utf-8")
        assert page.suffix != ".yml" or yaml.safe_load(text)["jobs"]
        named = set(re.findall(r"(?:^\s*|`|run: |&& )make ([a-z0-9-]+)", text, re.M))
        assert named <= targets, page.name


def test_every_flag_of_the_app_that_a_document_names_exists() -> None:
    shown = subprocess.run(
        [sys.executable, "-m", "fluxtui", "--help"], capture_output=True, text=True, check=True
    ).stdout
    for page in PAGES:
        for line in re.findall(r"fluxtrain-tui ([^`\n]*)", page.read_text(encoding="utf-8")):
            for flag in re.findall(r"--[a-z-]+", line):
                assert flag in shown, f"{page.name}: {flag}"
