"""Tab completes paths as a shell does: on the wizard's pages and line by line."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import pytest
from textual.widgets import Input

from fluxtui.answers.answers import Answers
from fluxtui.wizard.linear import completing
from fluxtui.wizard.steps.paths import completions, stem_of

Opened = Callable[..., AbstractAsyncContextManager[Any]]


@pytest.fixture
def models(tmp_path: Path) -> Path:
    """Folders and a file that begin alike."""
    root = tmp_path / "models"
    for name in ("qwen-0.5b", "qwen-7b", "llama"):
        (root / name).mkdir(parents=True)
    (root / "qwen.txt").write_text("")
    (root / ".hidden").mkdir()
    return root


def test_every_name_that_begins_so_is_found_and_they_agree_to_their_stem(models: Path) -> None:
    found = completions(f"{models}/qw", folders_only=True)
    assert found == (f"{models}/qwen-0.5b/", f"{models}/qwen-7b/")
    assert stem_of(found) == f"{models}/qwen-"
    assert f"{models}/qwen.txt" in completions(f"{models}/qw", folders_only=False)
    assert len(completions(f"{models}/", folders_only=True)) == 3, "hidden ones are asked for"
    assert completions(f"{models}/.h", folders_only=True) == (f"{models}/.hidden/",)
    assert completions("/no/such/folder/x", folders_only=False) == ()


async def test_tab_goes_as_far_as_names_agree_and_then_through_them(
    folder: Path, opened: Opened, models: Path
) -> None:
    answers = Answers(model_source="folder", step="model")
    async with opened(folder, answers, size=(120, 40)) as wizard:
        field = wizard.screen.query_one("#model_folder-input", Input)

        async def after_tab(text: str) -> None:
            await wizard.press("tab")
            await wizard.until(lambda: field.value == text)
            assert field.has_focus and field.cursor_position == len(text)

        await wizard.press("tab")
        await wizard.write(f"{models}/qw")
        await after_tab(f"{models}/qwen-")
        await after_tab(f"{models}/qwen-0.5b/")
        await after_tab(f"{models}/qwen-7b/")
        await after_tab(f"{models}/qwen-0.5b/")
        await wizard.until(lambda: wizard.screen.answers.model_folder == f"{models}/qwen-0.5b/")
        await wizard.press("ctrl+u")
        await wizard.write(f"{models}/lla")
        await after_tab(f"{models}/llama/")


async def test_tab_leaves_a_field_where_nothing_begins_so(
    folder: Path, opened: Opened, models: Path
) -> None:
    async with opened(folder, Answers(model_source="folder", step="model")) as wizard:
        field = wizard.screen.query_one("#model_folder-input", Input)
        await wizard.press("tab", *"/no/such")
        await wizard.until(lambda: field.has_focus)
        await wizard.press("tab")
        await wizard.until(lambda: not field.has_focus)
        assert field.value == "/no/such"


def test_the_dialogue_completes_paths_and_nothing_else(models: Path) -> None:
    readline = pytest.importorskip("readline")
    before = readline.get_completer()
    with completing("folder"):
        offered = readline.get_completer()
        assert offered(f"{models}/qw", 0) == f"{models}/qwen-0.5b/"
        assert offered(f"{models}/qw", 1) == f"{models}/qwen-7b/"
        assert offered(f"{models}/qw", 2) is None and offered("", 0) is None
    assert readline.get_completer() is before
    with completing("text"):
        assert readline.get_completer() is before
